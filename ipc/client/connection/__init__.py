"""The client's end of the socket: connecting, requests in flight, sending."""
