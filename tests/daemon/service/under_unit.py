"""Runs a command under the system call filter of a unit, as systemd makes it, without systemd.

``python -m tests.daemon.service.under_unit UNIT COMMAND…``: calls that `SystemCallFilter=` omits
are refused with EPERM, and `MemoryDenyWriteExecute=` refuses memory that is written and then run.
The sets of calls are those that `systemd-analyze` names; the filters are those of libseccomp, which
systemd uses too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

from tests.daemon.systemd_tools import directives, run_tool

ALLOW = 0x7FFF0000
DENY = 0x00050000 | errno.EPERM
PROT_WRITE, PROT_EXEC = 2, 4
MASKED_EQ = 7


class Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp`: argument *arg* & *mask* == *value*."""

    _fields_ = [
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    ]


def sets() -> dict[str, list[str]]:
    """Return systemd's sets of system calls."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in run_tool("systemd-analyze", "syscall-filter", "--no-pager").stdout.splitlines():
        word = line.strip().removeprefix("# ")
        if line.startswith("@"):
            name = word
            found[name] = []
        elif line.startswith("    ") and not line.strip().startswith("#"):
            found[name].append(word)
    return found


def expand(words: list[str], known: dict[str, list[str]]) -> set[str]:
    """Return the calls that *words* (calls and sets) stand for."""
    calls: set[str] = set()
    for word in words:
        calls |= expand(known[word], known) if word.startswith("@") else {word}
    return calls


def allowed(filters: list[str]) -> set[str]:
    """Return what the values of `SystemCallFilter=` allow, in their order."""
    known = sets()
    calls = expand(["@default"], known)
    for value in filters:
        if value.startswith("~"):
            calls -= expand(value[1:].split(), known)
        else:
            calls |= expand(value.split(), known)
    return calls


class Filter:
    """A filter of libseccomp's, whose default is *action*."""

    def __init__(self, action: int):
        self._library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._library.seccomp_init(action))

    def add(self, action: int, call: str, *comparisons: Comparison) -> None:
        """Add a rule; calls that this machine does not have need none."""
        number = self._library.seccomp_syscall_resolve_name(call.encode())
        if number < 0:
            return
        array = (Comparison * len(comparisons))(*comparisons)
        failed = self._library.seccomp_rule_add_array(
            self._context, ctypes.c_uint32(action), number, len(comparisons), array
        )
        assert not failed, f"{call}: {os.strerror(-failed)}"

    def load(self) -> None:
        """Load the filter for this process and its children."""
        failed = self._library.seccomp_load(self._context)
        assert not failed, os.strerror(-failed)


def enter(unit: dict[str, list[str]]) -> None:
    """Put this process under the filters of *unit*."""
    calls = Filter(DENY)
    for call in sorted(allowed(unit["SystemCallFilter"])):
        calls.add(ALLOW, call)
    memory = Filter(ALLOW)
    if unit.get("MemoryDenyWriteExecute") == ["yes"]:
        both = PROT_WRITE | PROT_EXEC
        memory.add(DENY, "mmap", Comparison(2, MASKED_EQ, both, both))
        for call in ("mprotect", "pkey_mprotect"):
            memory.add(DENY, call, Comparison(2, MASKED_EQ, PROT_EXEC, PROT_EXEC))
    memory.load()
    calls.load()


if __name__ == "__main__":
    enter(directives(Path(sys.argv[1])))
    os.execvp(sys.argv[2], sys.argv[2:])
