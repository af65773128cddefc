"""Metrics of a fleet for Prometheus: the entry's own, and those of all nodes."""
