"""The files and functions of inferd that one call of the protocol passes, process by process.

    python -m tools.call_profile                  # a `stream` of 8 tokens of SmolLM2
    python -m tools.call_profile --functions      # also the functions of each file
    python -m tools.call_profile --model echo

It starts a daemon, runs the turn once to load the model, and records the second one: every function
of inferd's own code that a process enters, in the order of the first call. Functions that Python
makes of comprehensions and lambdas count as part of the function around them.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import inferd
from inferd.testing import running_daemon

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("backends", "cli", "daemon", "gateways", "ipc", "scheduler", "sessions", "src", "wire")
MODEL = "smollm2-135m-instruct"
PROMPT = "Name three colors."
WAIT_S_MAX = 10.0
OFF, ON, DONE = 0, 1, 2


class ProcessCalls(NamedTuple):
    """One process and its functions by file, both in the order of the first call."""

    name: str
    functions: dict[str, list[str]]
    calls: int


def main() -> None:
    """Print the files that a turn passes."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--functions", action="store_true")
    arguments = parser.parse_args()
    found = profile(arguments.model, arguments.tokens)
    for process in found:
        passed = sum(map(len, process.functions.values()))
        print(f"{process.name}: {len(process.functions)} files, {passed} functions")
        for file, names in process.functions.items():
            print(f"  {file} ({len(names)})")
            for name in names if arguments.functions else ():
                print(f"    {name}")
    files = {file for process in found for file in process.functions}
    functions = {
        (f, n) for process in found for f, names in process.functions.items() for n in names
    }
    calls = sum(process.calls for process in found)
    print(f"in all: {len(files)} files, {len(functions)} functions, {calls} calls")


def profile(model: str, tokens: int) -> list[ProcessCalls]:
    """Run one `stream` of *tokens* tokens, and return the functions that each process entered."""
    with tempfile.TemporaryDirectory() as name, recording(Path(name)) as switch:
        with running_daemon(models_dir=ROOT / ".cache" / "models") as daemon:
            with inferd.Client(daemon.socket) as client:
                for state in (OFF, ON):
                    with client.session(model) as session:
                        switch[0] = state
                        options = {"n-predict": tokens, "temp": 0}
                        for _ in session.stream(PROMPT, options=options):
                            pass
                        if state == ON:
                            switch[0] = DONE
            folder = Path(name)
            wait_until_written(folder, daemon.pid)
        return sorted(read(folder), key=lambda process: process.name != "daemon")


@contextmanager
def recording(folder: Path) -> Iterator[mmap.mmap]:
    """Have the processes that start in the block record their calls while the switch is on."""
    path = folder / "on"
    path.write_bytes(bytes([OFF]))
    before = dict(os.environ)
    os.environ |= {
        "PYTHONPATH": str(Path(__file__).parent),
        "INFERD_CALL_PROFILE": str(folder),
        "INFERD_CALL_PROFILE_SOURCE": str(ROOT) + os.sep,
    }
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 1) as switch:
            yield switch
    finally:
        os.environ.clear()
        os.environ.update(before)


def wait_until_written(folder: Path, daemon: int) -> None:
    """Wait until the daemon and all processes below it have written their calls."""
    import psutil

    running = [psutil.Process(daemon), *psutil.Process(daemon).children(recursive=True)]
    expected = [folder / f"{p.pid}.json" for p in running if "python" in p.name()]
    end = time.monotonic() + WAIT_S_MAX
    while not all(path.exists() for path in expected):
        if time.monotonic() > end:
            sys.exit("a process did not write its calls")
        time.sleep(0.05)


def read(folder: Path) -> Iterator[ProcessCalls]:
    """Read the calls of each process that entered functions of inferd."""
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text())
        functions: dict[str, list[str]] = {}
        calls = 0
        for file, name, _, count in record["calls"]:
            relative = str(Path(file).relative_to(ROOT))
            # `<genexpr>`, `<lambda>` and comprehensions are parts of the function around them.
            name = name.split(".<locals>.<")[0]
            if relative.split("/")[0] not in ROOMS or name.startswith("<"):
                continue
            calls += count
            names = functions.setdefault(relative, [])
            if name not in names:
                names.append(name)
        if functions:
            yield ProcessCalls(process_name(record["command"]), functions, calls)


def process_name(command: list[str]) -> str:
    """Return the name of a process by its command line."""
    module = next((a for a in command if a.startswith("inferd.")), "daemon")
    return "worker" if module.endswith("scheduler.worker") else module


if __name__ == "__main__":
    main()
