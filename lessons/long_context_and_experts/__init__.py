"""Lesson 11: How do I split a long sequence, and many experts?"""
