"""Commands that show what the daemon does: ps, status, queue, stats, top."""
