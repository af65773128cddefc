"""Clients of an entry: their connections, and those to the nodes for each of them."""
