"""Lesson 03: How does NCCL do it?"""
