"""Lesson 20: what of the whole course is still known? It is asked again, by topic, with other numbers each time."""
