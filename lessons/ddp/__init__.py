"""Lesson 04: What happens inside `loss.backward()` under DDP?"""
