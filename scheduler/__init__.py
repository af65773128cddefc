"""The scheduler: queue, slots, batches, the engine that runs them, and the worker process.

It knows nothing of sessions, sockets and user names.
"""

from .priority import PRIORITIES, Priority
from .settings import EngineSettings

__all__ = ("PRIORITIES", "EngineSettings", "Priority")
