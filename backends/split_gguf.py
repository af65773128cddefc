"""File names of split models, as llama-gguf-split writes them."""

from __future__ import annotations

import re
from pathlib import Path

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
PARTS_MAX = 1000


def parts_of(file: Path) -> list[Path]:
    """Return the files of the model that *file* belongs to, in order."""
    part = PART.fullmatch(file.name)
    count = int(part["count"]) if part else 0
    if part is None or not 1 <= count <= PARTS_MAX:
        return [file]
    stem = part["stem"]
    return [file.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
