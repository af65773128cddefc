"""The daemon's log: its events, levels and destinations."""
