"""The exchange between a worker and the process that renders its chat template.

The first request is the template's source. Each later one has the values of one rendering.
"""

from __future__ import annotations

import enum

import msgspec

CHARACTERS_MAX = 1 << 24
MEMORY_BYTES_MAX = 256 << 20
"""Memory of the process besides the interpreter: its values, the output, and all in between."""
CPU_S_MAX = 0.5
"""CPU time of one rendering, which is that of 100 000 short messages."""


class Limit(enum.StrEnum):
    """A limit of one rendering. The process reports all except that on CPU time, which ends it."""

    CPU_S = "cpu_s"
    MEMORY_BYTES = "memory_bytes"
    CHARACTERS = "characters"


LIMITS = {
    Limit.CPU_S: (CPU_S_MAX, "s of CPU time"),
    Limit.MEMORY_BYTES: (MEMORY_BYTES_MAX, "bytes of memory"),
    Limit.CHARACTERS: (CHARACTERS_MAX, "characters"),
}


class RenderReply(msgspec.Struct, omit_defaults=True):
    """The reply of the process: the text, the limit that was exceeded, or the template's error."""

    text: str = ""
    limit: Limit | None = None
    refusal: str = ""
