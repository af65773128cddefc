"""Download of model files into the models directory, by the command line, never by the daemon.

`fetch` runs in the caller's process. It owns, under a lock, the unfinished files of one name,
``NAME.gguf.part`` and ``NAME.gguf.part.json``. One rename publishes the model after its checks. The
next pull resumes or removes the files of an interrupted one.
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
