"""`inferd doctor`: facts about the machine and its daemon, each looked at for a bounded time, and
what checks make of them: pure functions from facts to findings.
"""

__all__ = ()
