"""Scheduling decisions as pure functions: slots, batches, costs, wait estimates."""
