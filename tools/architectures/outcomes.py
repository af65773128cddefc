"""The outcome of a check, and the process that runs the checks of one file without a daemon.

The parent reads a line of JSON for each check. A check whose outcome is missing has ended the
process, and the rest of the checks run in another one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from inferd.backends import InferdError
from inferd.backends.errors import UnsupportedOperation
from tests.architectures.checks import CHECKS, Subject

__all__ = ("LOAD", "Outcome", "outcome_of", "run_checks")

LOAD = "load"
SECONDS_MAX = 900
"""Time for the checks of one file."""
STDERR_BYTES = 400
DETAIL_BYTES = 600
_BEGUN = "begun"


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a *check*: `refused` by a sentence, `failed`, or `died` with its process."""

    check: str
    kind: Literal["passed", "refused", "failed", "died", "begun"]
    detail: str = ""

    @property
    def is_finding(self) -> bool:
        """Whether it is neither a pass nor a refusal."""
        return self.kind in ("failed", "died")


def outcome_of(name: str, check: Callable[[], object]) -> Outcome:
    """Run a check, and return its outcome."""
    try:
        check()
    except UnsupportedOperation as exc:
        return Outcome(name, "refused", exc.message)
    except Exception as exc:
        where = traceback.extract_tb(exc.__traceback__)
        lines = [f"{Path(f.filename).name}:{f.lineno}" for f in where if "/tests/" in f.filename]
        detail = f"{type(exc).__name__}: {exc} ({' '.join(lines)})"
        return Outcome(name, "failed", " ".join(detail.split())[:DETAIL_BYTES])
    return Outcome(name, "passed")


def run_checks(path: Path, names: Sequence[str] = tuple(CHECKS)) -> list[Outcome]:
    """Run the checks of a file in processes of their own; the first outcome is that of its load."""
    found: dict[str, Outcome] = {}
    while waiting := [name for name in names if name not in found]:
        found |= {outcome.check: outcome for outcome in _run_process(path, waiting)}
        if found[LOAD].kind != "passed":
            break
    return list(found.values())


def _run_process(path: Path, names: Sequence[str]) -> list[Outcome]:
    """Return the outcomes of a process, the last of which may be its death."""
    command = [sys.executable, "-m", "tools.architectures.outcomes", str(path), *names]
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, timeout=SECONDS_MAX, check=False
            )
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as exc:
            code, output = -signal.SIGKILL, exc.stdout or b""
        errors.seek(0)
        printed = errors.read()[-STDERR_BYTES:].decode("utf-8", "replace")
    lines = [msgspec.json.decode(line, type=Outcome) for line in output.splitlines()]
    found = [outcome for outcome in lines if outcome.kind != _BEGUN]
    if code:
        end = signal.Signals(-code).name if code < 0 else f"exit {code}"
        begun = lines[-1].check if lines else LOAD
        found.append(Outcome(begun, "died", f"{end}: {' '.join(printed.split())}"))
    return found


def _outcomes(path: Path, names: Sequence[str]) -> Iterator[Outcome]:
    yield Outcome(LOAD, "begun")
    try:
        subject = Subject(path)
    except InferdError as exc:
        kind: Literal["refused", "failed"] = "failed"
        if isinstance(exc, UnsupportedOperation):
            kind = "refused"
        yield Outcome(LOAD, kind, exc.message)
        return
    yield Outcome(LOAD, "passed", subject.model.info.kv_kind)
    for name in names:
        yield Outcome(name, "begun")
        yield outcome_of(name, lambda name=name: _run(subject, name))  # type: ignore[misc]
    subject.close()


def _run(subject: Subject, name: str) -> None:
    subject.clear()
    CHECKS[name](subject)


def main() -> None:
    """Run the checks that the arguments name, and print their outcomes."""
    path, *names = sys.argv[1:]
    for outcome in _outcomes(Path(path), names):
        print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    main()
