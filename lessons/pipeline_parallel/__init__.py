"""Lesson 10: How do I split the layers, and where does the bubble go?"""
