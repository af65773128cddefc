"""The daemon: configuration, models and their workers, dispatch, metrics, and the command line."""

__all__ = ()
