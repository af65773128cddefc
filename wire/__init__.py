"""Frames, and the loop that reads a socket that carries them."""
