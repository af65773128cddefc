"""Scheduling decisions as pure functions: slots, batches, costs, shared prefixes."""
