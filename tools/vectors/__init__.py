"""Generator of docs/protocol-vectors.json: frames in hex with their meaning, for tests of clients.

It is deterministic: the same sources give the same file. `tests/ipc/test_vectors.py` plays the file
against the daemon and against the client.
"""
