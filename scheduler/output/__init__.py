"""Sampling, text and endings of turns."""
