"""Get a model file into the models directory. Only the command line does this, never the daemon.

`fetch` runs in the caller's process and owns, under a lock, the unfinished files of the one name
that it fetches: ``NAME.gguf.part`` and what lies beside it. The model appears under its own name
in one rename, after its checks; what an interrupted pull leaves is taken up or removed by the next.
"""

from __future__ import annotations

from .part import Progress, PullFailed
from .sources import KNOWN_MODELS, Source, parse_source
from .target import Pulled, fetch, files_of

__all__ = (
    "KNOWN_MODELS",
    "Progress",
    "PullFailed",
    "Pulled",
    "Source",
    "fetch",
    "files_of",
    "parse_source",
)
