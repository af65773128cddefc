"""Frames, the reading of sockets that carry them, and the metadata of a turn."""
