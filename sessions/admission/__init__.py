"""Bounds on waiting turns: for all users, and for each."""
