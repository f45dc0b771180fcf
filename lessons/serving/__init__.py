"""Lesson 17: One model, many GPUs, people who wait: who does what, and how long does it take?"""
