"""Settings from flags, environment and file; their schema and their page."""
