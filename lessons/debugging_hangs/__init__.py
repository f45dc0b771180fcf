"""Lesson 14: It hangs. Which rank, which call, why?"""
