"""Commands that start, configure and steer the daemon."""
