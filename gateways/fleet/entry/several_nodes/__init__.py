"""Calls that several nodes answer, at once or one after the other."""
