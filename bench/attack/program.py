"""`python -m bench.attack.program`: the program of one attack, as a process of a user."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

from .attack import Target
from .attacks import ATTACKS
from .users import FIRST_ATTACKER, connecting_as

READY = b"ready\n"


def main() -> None:
    """Read NAME, SECONDS and the target's fields, and run the program.

    The process exits without waiting for threads.
    """
    name, seconds, fields = sys.argv[1:4]
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    with tempfile.TemporaryDirectory(prefix="inferd-attack-") as folder:
        ends_at_s = time.monotonic() + float(seconds)
        target = Target(folder=Path(folder), ends_at_s=ends_at_s, **json.loads(fields))
        with connecting_as(FIRST_ATTACKER + target.number):
            sys.stdout.buffer.write(READY)
            sys.stdout.buffer.flush()
            threading.Thread(target=ATTACKS[name].program, args=(target,), daemon=True).start()
            while not target.is_over():
                time.sleep(0.05)


if __name__ == "__main__":
    main()
