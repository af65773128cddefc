"""Writes docs/protocol-vectors.json: frames in hex beside what they mean, for clients to test with.

Deterministic: the same sources give the same file. `tests/ipc/test_vectors.py` plays it against the
daemon and against our client.
"""
