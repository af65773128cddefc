"""KV states in slots, in memory and on disk."""
