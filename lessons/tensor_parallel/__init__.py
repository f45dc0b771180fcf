"""Lesson 09: How do I split one layer over ranks?"""
