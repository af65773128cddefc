"""The bond of a child process to its parent, and its present memory.

Workers import this module at their start, and so not `subprocess`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def bind_to_parent(parent: int, oom_score_adj: int | None = None) -> None:
    """Let this process end with its *parent*, and ignore SIGINT, SIGTERM and SIGHUP. With a high
    *oom_score_adj* the kernel ends it before others if memory runs out.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that starts processes blocks all
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)
    if oom_score_adj is not None:
        with suppress(OSError):  # a sandbox may forbid it; the daemon's score is lower
            Path("/proc/self/oom_score_adj").write_text(str(oom_score_adj))


def present_bytes() -> int:
    """Return the addresses that this process has mapped, which limits of memory count."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
