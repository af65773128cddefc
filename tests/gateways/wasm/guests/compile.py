"""Compile `guest.c` with Zig, which has a C library for WebAssembly: `make guest`.

The repository has the program, which is the same on every machine: the compiler takes 400 MB of
disk, and a minute for its C library. `guest.LICENSE` is for the parts of that library in it.
"""

from __future__ import annotations

import subprocess
import sys

from . import FOLDER, SUMS, c_guest, sums


def main() -> None:
    """Write the program and the sums of its files."""
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "wasm32-wasi", "-O1", "-s"]
    subprocess.run([*command, "-o", str(c_guest()), str(FOLDER / "guest.c")], check=True)
    c_guest().chmod(0o644)
    SUMS.write_text(sums())


if __name__ == "__main__":
    main()
