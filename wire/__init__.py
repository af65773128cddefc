"""Framing: bytes of a stream to frames and back, without sockets."""
