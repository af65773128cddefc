"""What daemon and worker say to each other: commands down, reports up, lists of them a frame.

Both sides are of one version, so the structs are arrays without names; nothing else speaks this.
"""

from .commands import *
from .packing import *
from .reports import *
from .tasks import *
