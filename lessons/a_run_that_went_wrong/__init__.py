"""Lesson 19: The loss falls. Is the run all right?"""
