"""Which models are in memory: budget, estimates, eviction, memory pressure."""
