"""`python -m bench.attack.program`: the program of one attack, as a process of a user."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path

from .attack import Target
from .attacks import ATTACKS
from .users import FIRST_ATTACKER, connecting_as

READY = "ready"
"""The line that the process prints when the program begins."""


def main() -> None:
    """Read NAME, SECONDS, FOLDER and the target's fields, and run the program.

    The process exits without waiting for threads. It fails if the program or one of its threads
    ends early: an attack that has ended measures nothing.
    """
    threading.excepthook = _fail
    name, seconds, folder, fields = sys.argv[1:5]
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    ends_at_s = time.monotonic() + float(seconds)
    target = Target(folder=Path(folder), ends_at_s=ends_at_s, **json.loads(fields))
    with connecting_as(FIRST_ATTACKER + target.number):
        print(READY, flush=True)
        thread = threading.Thread(target=ATTACKS[name].program, args=(target,), daemon=True)
        thread.start()
        thread.join(float(seconds))
        if not target.is_over():
            raise SystemExit(f"{name} ended early")


def _fail(error: threading.ExceptHookArgs) -> None:
    sys.excepthook(error.exc_type, error.exc_value or error.exc_type(), error.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
