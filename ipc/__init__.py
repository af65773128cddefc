"""The protocol: messages, the client library, and the daemon's end of the socket.

It knows nothing of sessions and models. `ipc.client` and `ipc.server` do not import each other.
"""
