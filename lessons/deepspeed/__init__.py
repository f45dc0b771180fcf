"""Lesson 08: What does DeepSpeed do differently, and when do I pick it?"""
