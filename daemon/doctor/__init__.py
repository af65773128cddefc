"""`inferd doctor`: probes that collect facts, each in bounded time, and checks of these facts.

The checks are pure functions from facts to findings.
"""

__all__ = ()
