"""Worker processes of the daemon: their start, link, recovery and cores."""
