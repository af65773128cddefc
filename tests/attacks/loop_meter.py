"""A daemon that measures the blocks of its event loop, by the CPU time of its thread.

`python -m tests.attacks.loop_meter FILE …` runs the command `inferd …` and writes the longest block
in seconds to FILE, which the test maps and resets.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Any, Self

from inferd.testing import RunningDaemon

_LONGEST = struct.Struct("d")


class MeteredDaemon(RunningDaemon):
    """A daemon whose longest block can be read."""

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def start(self) -> None:
        super().start()
        with open(self._file, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LONGEST.size)

    @property
    def _file(self) -> Path:
        return self.directory / "longest"

    def _command(self) -> list[str]:
        self._file.write_bytes(_LONGEST.pack(0.0))
        command = super()._command()
        return [sys.executable, "-m", __name__, str(self._file), *command[3:]]

    def read_longest_s(self) -> float:
        """Return the longest block since the last call."""
        (longest,) = _LONGEST.unpack_from(self._map)
        _LONGEST.pack_into(self._map, 0, 0.0)
        return float(longest)


def _measure_blocks(path: str) -> None:
    """Note the CPU time of each callback that the loop runs."""
    with open(path, "r+b") as file:
        noted = mmap.mmap(file.fileno(), _LONGEST.size)
    run, now = asyncio.Handle._run, time.thread_time

    def measure(handle: Any) -> None:
        began = now()
        run(handle)
        seconds = now() - began
        if seconds > _LONGEST.unpack_from(noted)[0]:
            _LONGEST.pack_into(noted, 0, seconds)

    setattr(asyncio.Handle, "_run", measure)  # noqa: B010


def main() -> None:
    """Run the command with measured blocks, on the loop of the standard library."""
    from inferd.cli import main as run_command

    sys.modules["uvloop"] = None  # type: ignore[assignment]
    _measure_blocks(sys.argv.pop(1))
    run_command()


if __name__ == "__main__":
    main()
