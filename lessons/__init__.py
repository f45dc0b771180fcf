"""The lessons: one room each, with its text, exercises, solutions, checks, figures and helpers."""
