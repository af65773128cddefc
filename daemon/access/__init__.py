"""Access rules, and the right that each call needs."""
