"""The daemon's metrics for Prometheus: what there is, what is counted, and where it is served."""

__all__ = ()
