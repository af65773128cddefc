"""Builds of the TypeScript client, shared by all modules."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

__all__ = ("CLIENT", "NODE_VERSION", "compiled", "environment", "node", "packages", "run")

ROOT = Path(__file__).resolve().parents[3]
CLIENT = ROOT / "clients" / "typescript"
LOCK = ROOT / "build" / "typescript.lock"
NODE_VERSION = (20, 11)
RUN_S_MAX = 240


@cache
def node() -> str:
    """Return the path of Node.js."""
    found, npm = shutil.which("node"), shutil.which("npm")
    # The tests are not skipped: a run without Node.js would look as if they had passed.
    needed = "these tests need Node.js {}.{} or newer, with npm".format(*NODE_VERSION)
    assert found and npm, needed
    version = run([found, "--version"], CLIENT).strip()
    assert tuple(map(int, version.strip("v").split(".")[:2])) >= NODE_VERSION, (
        f"{needed}: {version}"
    )
    return found


def environment(**more: str) -> dict[str, str]:
    """Return the environment of the tests, with this environment's `inferd` on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **more}


def run(command: list[str], folder: Path, **more: str) -> str:
    """Run a command in a folder and return its output."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=RUN_S_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        output, errors = process.communicate()
        errors += f"\nit was killed after {RUN_S_MAX} s"
    assert process.returncode == 0, f"{command}:\n{output}{errors}"
    return output


@cache
def packages() -> Path:
    """Install the packages of the lock file if they are not installed, and return their folder."""
    node()
    installed, lock = CLIENT / "node_modules", (CLIENT / "package-lock.json").read_text()
    stamp = installed / ".installed"
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as file:  # other test processes do the same
        fcntl.flock(file, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != lock:
            run(["npm", "ci", "--prefer-offline", "--no-progress"], CLIENT)
            stamp.write_text(lock)
    return installed


@cache
def compiled() -> Path:
    """Compile the client with its tests, and return the folder of the tests."""
    tsc = str(packages() / ".bin" / "tsc")
    run([tsc, "--project", "."], CLIENT)
    return CLIENT / "build" / "test"
