"""A model without weights that repeats its input; it ships, and tests use it as their double."""
