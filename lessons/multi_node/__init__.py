"""Lesson 16: How do I leave this machine: torchrun, elastic, Slurm?"""
