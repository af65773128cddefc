"""The daemon's end of the socket: listening, connections, requests."""
