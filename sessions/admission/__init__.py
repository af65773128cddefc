"""Bounds of users, the admission of turns, and estimates for refused ones."""
