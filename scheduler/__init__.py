"""The scheduler: queue, slots, batches, the engine that runs them, and the worker process.

It knows nothing of sessions, sockets and user names.
"""

from .limits import Limits
from .priority import PRIORITIES, Priority

__all__ = ("PRIORITIES", "Limits", "Priority")
