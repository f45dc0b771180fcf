"""Lesson 18: One job from a model and a budget to a report: can you do all of it, on a machine that others broke?"""
