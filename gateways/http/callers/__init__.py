"""Senders of requests: their keys, rights and bounds, and the hosts and origins they come from."""
