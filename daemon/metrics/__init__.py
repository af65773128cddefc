"""The daemon's metrics for Prometheus: their table, counters, collection and pages."""
