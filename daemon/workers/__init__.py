"""Worker processes as the daemon sees them: start, link, recovery, cores."""
