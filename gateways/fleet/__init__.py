"""More than one machine: an entry that serves the protocol from the daemons of several nodes.

docs/fleet.md describes its architecture, promises and limits.
"""
