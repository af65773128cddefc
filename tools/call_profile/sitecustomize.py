"""Recording of the functions of inferd that a process enters while the recording is on.

Python imports this module at its start if its folder is in PYTHONPATH. `tools/call_profile` puts it
there for a daemon, whose workers inherit it.
"""

from __future__ import annotations

import atexit
import json
import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

FOLDER = os.environ.get("INFERD_CALL_PROFILE", "")
LIBRARY = os.environ.get("INFERD_CALL_PROFILE_SOURCE", "")
SECONDS_BETWEEN_LOOKS = 0.02


class Recorder:
    """The functions that this process has entered while the first byte of `on` was 1, in the order
    of their first call.
    """

    def __init__(self, folder: Path):
        self._path = folder / f"{os.getpid()}.json"
        with (folder / "on").open("rb") as file:
            self._on = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
        self._found: dict[CodeType, int] = {}

    def start(self) -> None:
        """Record the calls of all threads that begin from now on, and of this one."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        atexit.register(self._write)
        threading.Thread(target=self._write_when_done, daemon=True).start()

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self._on[0] == 1:
            self._found[frame.f_code] = self._found.get(frame.f_code, 0) + 1

    def _write_when_done(self) -> None:
        sys.setprofile(None)
        done = threading.Event()
        while not done.wait(SECONDS_BETWEEN_LOOKS):
            if self._on[0] == 2:
                self._write()
                return

    def _write(self) -> None:
        calls = [
            (os.path.realpath(code.co_filename), code.co_qualname, code.co_firstlineno, count)
            for code, count in list(self._found.items())
            if LIBRARY in os.path.realpath(code.co_filename)
        ]
        command = Path("/proc/self/cmdline").read_bytes().decode().split("\0")
        self._path.with_suffix(".new").write_text(json.dumps({"command": command, "calls": calls}))
        self._path.with_suffix(".new").rename(self._path)


if FOLDER:
    Recorder(Path(FOLDER)).start()
