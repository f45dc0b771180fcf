"""Lesson 00: Does my machine work, and how do I run code on many ranks from a cell?"""
