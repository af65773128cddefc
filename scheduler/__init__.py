"""The scheduler: queue, slots, batches, the engine that runs them, and the worker process.

It knows nothing of sessions, sockets and user names.
"""

from .owner import PRIORITIES, PRIORITY_MAX, Owner, Priority
from .settings import EngineSettings

__all__ = ("PRIORITIES", "PRIORITY_MAX", "EngineSettings", "Owner", "Priority")
