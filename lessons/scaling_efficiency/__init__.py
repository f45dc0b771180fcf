"""Lesson 05: Why is 8 GPUs not 8×, and what wins it back?"""
