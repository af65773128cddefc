"""Comparison of this checkout with an earlier commit, as programs and users see both.

    python -m tools.compare_with_commit COMMIT

Two daemons of the commit and one of this checkout, each on a copy of the same state directory,
which a daemon of the commit has written (journal, named states, KV files), get the same commands
with `--json`. If a key, a type or a value is the same in both answers of the commit, it must be the
same in the answer of this checkout. Values that differ between two daemons of one
commit (times, process ids, memory) are compared by their type. Then it lists which of the files
that show the same from inside have changed: the conformance suite, the vectors of the protocol, the
examples and the tests of the client's types.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / ".cache" / "models"
MODEL = "smollm2-135m-instruct"
CONFIG = f"""
[daemon]
tuning = false
[models.{MODEL}]
slots = 2
ctx-size = 2048
[models.double]
backend = "echo"
"""
WRITTEN = (
    f"run {MODEL} --session colors -o seed=1 -o temp=0 -o n-predict=12 'Name three colors.'",
    f"run {MODEL} --session animals -o seed=1 -o temp=0 -o n-predict=12 'Name three animals.'",
    "run double --session echoed 'one two three'",
    "rm-session --undo 3000 animals",
)
"""Commands before the comparison, which write the state directory."""
COMPARED = (
    *("--version", "models", f"show {MODEL}", "show double", "parameters", "ps", "sessions"),
    *("queue", "status", "stats", "states", "config check", "config show", "config schema"),
    f"template {MODEL} 'Say hello.'",
    f"load {MODEL}",
    f"run {MODEL} --session colors -o seed=1 -o temp=0 -o n-predict=12 'And three more?'",
    f"run {MODEL} -o seed=1 -o temp=0.7 -o n-predict=16 'Write a line about the sea.'",
    "run double --session echoed 'four five'",
    "run no-such-model hello",
    "run double -o temperture=1 hello",
    f"embed {MODEL} 'one text'",
    *(
        "pin double",
        "unpin double",
        "unload double",
        "log-level",
        "cancel nobody",
        "ps",
        "sessions",
    ),
    *("stats", "drain", "status"),
)
FILES = (
    *("gateways/conformance", "docs/protocol-vectors.json", "examples", "tests/typing_client.py"),
    *("tests/examples", "systemd"),
)
MEASURED = re.compile(r"memory|bytes|_ms|_s\b|seconds")
"""Paths of values that are measured: they are compared by their types."""
READY_S_MAX = 30.0


class Side:
    """A source tree with its daemon on its own state directory."""

    def __init__(self, source: Path, folder: Path):
        self._source, self.folder = source, folder
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(CONFIG)
        self.environment = os.environ | {
            "PYTHONPATH": str(source / "src"),
            "INFERD_SOCKET": str(folder / "inferd.sock"),
            "INFERD_CONFIG": str(folder / "config.toml"),
            "INFERD_MODELS_DIR": str(MODELS),
            "INFERD_STATE_DIR": str(folder / "state"),
            "INFERD_METRICS": str(folder / "metrics.sock"),
            "NO_COLOR": "1",
            "COLUMNS": "100",
        }

    def run(self, command: str) -> tuple[int, Any]:
        """Run a command with `--json`; return its exit status and what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "inferd", "--json", *shlex.split(command)],
            env=self.environment,
            capture_output=True,
            text=True,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
        )
        output = done.stdout or done.stderr
        text = output.replace(str(self.folder), "FOLDER").replace(str(MODELS), "MODELS")
        text = text.replace(str(self._source), "SOURCE")
        try:
            return done.returncode, json.loads(text)
        except json.JSONDecodeError:
            lines = [_json_or_text(line) for line in text.splitlines()]
            return done.returncode, lines

    @contextmanager
    def daemon(self) -> Iterator[None]:
        """Run a daemon of this side."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "inferd", "serve"], env=self.environment, stderr=log
            )
        try:
            end = time.monotonic() + READY_S_MAX
            while self.run("status")[0] != 0:
                if process.poll() is not None or time.monotonic() > end:
                    sys.exit((self.folder / "log").read_text())
            yield
        finally:
            process.terminate()
            process.wait()


def _json_or_text(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return line


def differences(old: Any, same: Any, new: Any, path: str = "") -> Iterator[str]:
    """Name each place where *new* differs from *old*. Values in which *same*, another answer
    of the old side, differs too are compared by their type.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            here = f"{path}.{key}"
            if key in old and key in new:
                other = same.get(key) if isinstance(same, dict) else None
                yield from differences(old[key], other, new[key], here)
            elif not (isinstance(same, dict) and (key in old) != (key in same)):
                yield f"{here}: {'is gone' if key in old else 'is new'}"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        others = same if isinstance(same, list) and len(same) == len(old) else [None] * len(old)
        for number, (a, b, c) in enumerate(zip(old, others, new, strict=True)):
            yield from differences(a, b, c, f"{path}[{number}]")
    elif old == same and old != new and not (MEASURED.search(path) and _is_number(new)):
        yield f"{path}: {old!r} became {new!r}"
    elif type(old) is not type(new) and not {type(old), type(new)} <= {int, float}:
        yield f"{path}: {old!r} became {new!r}, of another type"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def compare(old: Side, same: Side, new: Side) -> int:
    """Run the commands on three daemons, print the differences, and return their number."""
    number = 0
    with old.daemon(), same.daemon(), new.daemon():
        for command in COMPARED:
            one, other, changed = (list(side.run(command)) for side in (old, same, new))
            found = list(differences(one, other, changed))
            number += len(found)
            print(f"{'differs' if found else 'same   '}  inferd --json {command}")
            for line in found:
                print(f"           {line[:300]}")
    return number


def main() -> None:
    """Compare with a commit; the exit status is 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name), Path(name) / "source"
        git = ["git", "-C", str(ROOT)]
        subprocess.run([*git, "worktree", "add", "-q", "--detach", source, commit], check=True)
        try:
            number = _compare_in(folder, source)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", source], check=True)
        changed = subprocess.run(
            [*git, "diff", "--stat", commit, "--", *FILES], check=True, capture_output=True
        ).stdout.decode()
    print(f"{number} differences")
    print(f"files that changed among {', '.join(FILES)}:\n{changed or ' none'}")
    sys.exit(bool(number))


def _compare_in(folder: Path, source: Path) -> int:
    writer = Side(source, folder / "writer")
    with writer.daemon():
        for command in WRITTEN:
            status, answer = writer.run(command)
            if status != 0:
                sys.exit(f"{command}: {answer}")
    sides = []
    for number, tree in enumerate((source, source, ROOT)):
        shutil.copytree(writer.folder / "state", folder / str(number) / "state")
        sides.append(Side(tree, folder / str(number)))
    return compare(*sides)


if __name__ == "__main__":
    main()
