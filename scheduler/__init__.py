"""Who runs next: the queue, the slots, the plan, the engine, and the process that turns it.

Knows nothing of sessions, sockets and users' names. `plan.py` decides, without model, clock or
thread; `engine.py` does what it decided; `worker.py` is the process; `messages.py` is what daemon
and worker say to each other.
"""

from .engine.engine import Engine
from .limits import Limits
from .priority import PRIORITIES, Priority

__all__ = ("PRIORITIES", "Engine", "Limits", "Priority")
