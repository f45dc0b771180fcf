"""Lesson 07: How do I train with FSDP2, and checkpoint and reshard it?"""
