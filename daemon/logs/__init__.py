"""The daemon's log: what is logged, and where to."""
