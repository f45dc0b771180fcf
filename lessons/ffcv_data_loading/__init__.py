"""Lesson 15: Is the GPU waiting for data, and how does FFCV fix that?"""
