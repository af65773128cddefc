"""Settings from flags, environment and file; their schema."""
