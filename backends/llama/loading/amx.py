"""Detection of builds of llama.cpp whose AMX code crashes.

GCC before 14 stores only a part of the tiles' configuration (GCC bug 114098). On a CPU with AMX,
such a build ends its process by SIGSEGV at the first prompt of more than a few tokens.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from llama_cpp import llama_cpp as lib

GCC_MAJOR_MIN = 14
"""The first version of GCC whose AMX code works."""
_COMPILER = re.compile(rb"GCC: \([^)\0]*\) (\d+)\.")
"""An entry of the ELF section `.comment`."""


@cache
def has_broken_amx() -> bool:
    """Return whether llama.cpp was built with AMX by a compiler that breaks it."""
    info = lib.llama_print_system_info().decode(errors="replace")
    if "AMX_INT8 = 1" not in info:
        return False
    try:
        library = Path(lib._lib._name).with_name("libggml-cpu.so").read_bytes()
    except OSError:
        return False
    return is_by_old_gcc(library)


def is_by_old_gcc(library: bytes) -> bool:
    """Return whether a version of GCC that breaks AMX compiled a part of *library*."""
    return any(int(major) < GCC_MAJOR_MIN for major in _COMPILER.findall(library))
