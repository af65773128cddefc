"""The scheduler: queue, slots, batches, the engine that runs them, and the worker process.

Knows nothing of sessions, sockets and names of users.
"""

from .limits import Limits
from .priority import PRIORITIES, Priority

__all__ = ("PRIORITIES", "Limits", "Priority")
