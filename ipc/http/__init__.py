"""A small HTTP server for the metrics of a process, and its listen address."""
