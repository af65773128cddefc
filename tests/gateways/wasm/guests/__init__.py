"""Guests of the tests. `make guest` compiles the one in C after a change of its source."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ("FOLDER", "SUMS", "c_guest", "sums")

FOLDER = Path(__file__).parent
SUMS = FOLDER / "guest.sha256"
"""The sums of the sources and of the program that was compiled from them, as of `sha256sum`."""
FILES = ("guest.c", "guest.wasm", "wasi_ephemeral_nn.h")


def c_guest() -> Path:
    """Return the program that was compiled from `guest.c`."""
    return FOLDER / "guest.wasm"


def sums() -> str:
    """Return what `SUMS` has if the program is that of the sources."""
    found = ((hashlib.sha256((FOLDER / name).read_bytes()).hexdigest(), name) for name in FILES)
    return "".join(f"{digest}  {name}\n" for digest, name in found)
