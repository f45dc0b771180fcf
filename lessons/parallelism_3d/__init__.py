"""Lesson 12: Which TP × PP × CP × DP for this model on this cluster?"""
