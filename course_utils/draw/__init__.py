"""Kits of figures and of explorers: one style, the same colour for the same rank everywhere.

Every figure is one that pyplot no longer tracks, so that a cell ending in it shows it once. Its title says what is
shown and whether it is measured, recorded (with the source beside it) or modelled.
"""
