"""Lesson 06: Where does the memory go, and what does each ZeRO stage remove?"""
