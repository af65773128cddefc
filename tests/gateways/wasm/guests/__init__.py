"""Guests in C, compiled once for each version of their source and of the compiler."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

__all__ = ("c_guest",)

FOLDER = Path(__file__).parent
CACHE = FOLDER.parents[3] / ".cache" / "guests"
COMPILE_S_MAX = 300.0
"""The first compilation on a machine also compiles the C library."""


def c_guest() -> Path:
    """Return the compiled `guest.c`."""
    sources = [(FOLDER / name).read_bytes() for name in ("guest.c", "wasi_ephemeral_nn.h")]
    key = hashlib.sha256(b"\0".join((*sources, version("ziglang").encode()))).hexdigest()[:16]
    target = CACHE / f"guest-{key}.wasm"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = CACHE / f"{target.name}.{os.getpid()}"
        command = [sys.executable, "-m", "ziglang", "cc", "-target", "wasm32-wasi", "-O1", "-s"]
        subprocess.run(
            [*command, "-o", str(made), str(FOLDER / "guest.c")],
            check=True,
            timeout=COMPILE_S_MAX,
            env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(CACHE / "zig")},
        )
        made.replace(target)
    return target
