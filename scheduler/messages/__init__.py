"""The messages between daemon and worker: commands down, reports up, a list of them in each frame.

Both sides are of one build, so the structs are arrays without names.
"""

from .base import *
from .commands import *
from .reports import *
from .tasks import *
