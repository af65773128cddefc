"""Commands that show the daemon's state and metrics: ps, status, queue, stats, top."""
