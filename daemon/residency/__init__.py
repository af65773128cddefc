"""Residency of models in memory: budget, estimates, eviction, memory pressure."""
