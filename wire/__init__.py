"""Frames, and the reading of sockets that carry them."""
