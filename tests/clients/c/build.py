"""Builds of the C client, its libraries and these tests' C programs, shared by all modules."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

__all__ = ("HERE", "CLIENT", "ADDRESS", "THREAD", "build", "compiler", "scenarios")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CLIENT = ROOT / "clients" / "c"
ADDRESS = "address,undefined"
THREAD = "thread"


@cache
def compiler() -> str:
    """Return the C compiler."""
    found = shutil.which(os.environ.get("CC", "cc"))
    # The tests are not skipped: a run without a compiler would look as if they had passed.
    assert found, "these tests need a C compiler with libasan and libtsan: install Debian's gcc"
    return found


@cache
def build(sanitizers: str) -> Path:
    """Run the Makefile of these tests with *sanitizers*, and return the folder of the programs."""
    folder = ROOT / "build" / "c" / re.sub(r"\W", "-", sanitizers or "plain")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # other test processes build the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(
            [
                *("make", "-j2", "-C", str(HERE), f"BUILD={folder}", f"CC={compiler()}"),
                f"SANITIZE={sanitizers}",
            ],
            capture_output=True,
            text=True,
        )
    assert made.returncode == 0, made.stderr
    return folder


def scenarios(program: str) -> list[str]:
    """Return the names of the scenarios in a C program's source."""
    return re.findall(r"^SCENARIO\((\w+)\)", (HERE / f"{program}.c").read_text(), re.M)
