"""The protocol's messages: what the frames hold. `docs/protocol.md` says the same in prose.

A frame is an array whose first item is its kind::

    [0, hello]                 first frame of each side
    [1, id, call, params]      request          client → daemon
    [2, id, result]            reply            daemon → client
    [3, id, error]             error reply      daemon → client
    [4, id, event]             event of a call  daemon → client
    [5, id, events]            credit           client → daemon
    [6, error]                 goodbye          daemon → client, then the connection closes

Params, results and events are maps; fields that one side does not know are ignored.
"""

from .base import *
from .calls import *
from .contexts import *
from .graphs import *
from .hello import *
from .models import *
from .monitoring import *
from .session_operations import *
from .tensors import *
from .texts import *
from .turns import *
