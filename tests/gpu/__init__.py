"""Checks on machines with GPUs, which ``python -m tools gpu-check`` runs."""
