"""The protocol: messages, the client library, and the daemon's end of the socket.

Knows nothing of sessions and models. `ipc.client` and `ipc.server` never import each other.
"""
