"""Lesson 13: Where does a step's time go?"""
