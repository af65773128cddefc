"""The HTTP server of a process's metrics, its listen address, and the rows of metric tables."""
