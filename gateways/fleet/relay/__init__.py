"""A node's relay: the daemon's protocol over mutual TLS, and reports of its load."""
