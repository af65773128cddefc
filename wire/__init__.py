"""Framing, without sockets, and the reading loop of sockets that carry frames."""
