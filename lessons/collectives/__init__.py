"""Lesson 02: What does each collective do, and how many bytes does it move?"""
