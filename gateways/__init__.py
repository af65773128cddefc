"""Gateways, which offer the daemon's models through other interfaces than its own protocol.

They are clients of the daemon; the daemon imports none of them.
"""
