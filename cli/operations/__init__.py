"""Commands that start, configure and control the daemon."""
