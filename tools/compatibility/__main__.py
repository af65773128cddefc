"""Writer of docs/compatibility.md, for `make compat`.

With the names of some programs in ARGS, it only shows their output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inferd.testing import running_daemon
from tools.compatibility.environments import PROGRAMS, ROOT, Program
from tools.compatibility.settings import PAGE, with_settings

MODEL_FILE = ROOT / ".cache" / "models" / "smollm2-135m-instruct.gguf"
MODEL = "smollm2"
IMAGE_MODEL = "eyes"
"""A test model, which reads images and repeats texts: SmolLM2 reads none."""
CONFIG = (
    f"[models.{MODEL}]\nslots = 4\nctx-size = 2048\n"
    f'[models.{IMAGE_MODEL}]\nbackend = "echo"\n[models.{IMAGE_MODEL}.echo]\nmedia = true\n'
)
SERVING = "serving HTTP on "
PROGRAM_S_MAX = 400
SHOWN_MAX = 100
HEAD = """# Programs on the HTTP gateway

`make compat` writes this page. It installs the latest version of each program from PyPI or npm
into an environment of its own, and runs it against `inferd gateway` with SmolLM2 135M Instruct.
The answers are those of a very small model; images are read by the test model `echo`, which repeats
the text beside them. The scripts are in `tools/compatibility/programs/`.
The Python clients of OpenAI, Anthropic and Ollama, and pydantic-ai, are part of the tests instead.
Last run: {date}.

| program | version | run | result |
|---|---|---|---|
"""
Line = dict[str, Any]


@contextmanager
def running_gateway() -> Iterator[str]:
    """Yield the address of a gateway to a daemon with the model."""
    with tempfile.TemporaryDirectory() as models:
        (Path(models) / f"{MODEL}.gguf").symlink_to(MODEL_FILE)
        with running_daemon(CONFIG, models_dir=models) as daemon:
            command = [sys.executable, "-m", "inferd", "gateway", "--listen", "127.0.0.1:0"]
            with subprocess.Popen(
                command, env=daemon.environment, stderr=subprocess.PIPE, text=True
            ) as process:
                assert process.stderr is not None
                try:
                    line = process.stderr.readline()
                    assert line.startswith(SERVING), line
                    yield f"http://{line.removeprefix(SERVING).strip()}"
                finally:
                    process.terminate()


def run_checks(program: Program, url: str) -> list[Line]:
    """Return the lines that a program's script prints; if it ends early, one with its error."""
    environment = {
        **os.environ,
        "GATEWAY_URL": url,
        "GATEWAY_MODEL": MODEL,
        "GATEWAY_IMAGE_MODEL": IMAGE_MODEL,
    }
    try:
        done = subprocess.run(
            program.command, env=environment, capture_output=True, text=True, timeout=PROGRAM_S_MAX
        )
    except subprocess.TimeoutExpired:
        return [{"check": "all", "error": f"it took more than {PROGRAM_S_MAX} s"}]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    if done.returncode or not lines:
        lines.append({"check": "all", "error": done.stderr[-300:] or "there is no output"})
    return lines


def table_row(program: Program, version: str, line: Line) -> str:
    """Return the row of a check."""
    text = " ".join(str(line.get("error") or line["output"]).split())
    short = text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 1] + "…"
    result = "**fails**" if "error" in line else "works"
    shown = short.replace("|", "\\|").replace("`", "'")
    return f"| {program.title} | {version} | {line['check']} | {result}: `{shown}` |\n"


def main() -> None:
    """Run all programs and write the page; or run those that are named, and print their output."""
    named = sys.argv[1:]
    rows, failed = [], 0
    with running_gateway() as url:
        for program in PROGRAMS:
            if named and program.package not in named:
                continue
            program.install()
            version = program.find_version()
            for line in run_checks(program, url):
                print(program.package, version, json.dumps(line, ensure_ascii=False), flush=True)
                rows.append(table_row(program, version, line))
                failed += "error" in line
    if not named:
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        PAGE.write_text(with_settings(HEAD.format(date=date) + "".join(rows)))
    sys.exit(f"{failed} checks failed" if failed else 0)


if __name__ == "__main__":
    main()
