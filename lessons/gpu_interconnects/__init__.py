"""Lesson 01: How fast can data move, and where is the slow link?"""
