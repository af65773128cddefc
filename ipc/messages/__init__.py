"""The protocol's messages, as `docs/protocol.md` describes them.

A frame is an array whose first item is its kind::

    [0, hello]                 first frame of each side
    [1, id, call, params]      request          client → daemon
    [2, id, result]            reply            daemon → client
    [3, id, error]             error reply      daemon → client
    [4, id, event]             event of a call  daemon → client
    [5, id, events]            credit           client → daemon
    [6, error]                 goodbye          daemon → client, then the connection closes
    [7, id, change]            copied change    daemon → client that asked for copies

Params, results and events are maps. Each side ignores fields that it does not know.
"""

from .base import *
from .between_daemons import *
from .buffers import *
from .calls import *
from .channels import *
from .contexts import *
from .graphs import *
from .jobs import *
from .models import *
from .monitoring import *
from .results import *
from .session_operations import *
from .texts import *
from .turns import *
