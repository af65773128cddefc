"""The kernel's limits on child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import os, socket, sys
from inferd.backends.sandbox import forbid_new_files
folder, memory = sys.argv[1], os.memfd_create("memory")
supported = forbid_new_files()
listener = socket.socket()
attempts = {
    "make": lambda: open(f"{folder}/new", "w"),
    "write": lambda: open(f"{folder}/old", "a"),
    "remove": lambda: os.remove(f"{folder}/old"),
    "folder": lambda: os.mkdir(f"{folder}/sub"),
    "link": lambda: os.symlink("a", f"{folder}/link"),
    "execute": lambda: os.execv("/bin/true", ["true"]),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except PermissionError:
        print("denied", name)
    else:
        print("done", name)
assert open(f"{folder}/old").read() == "text" and os.write(memory, b"x") == 1
print("supported" if supported else "unsupported")
"""


def test_a_process_without_the_right_to_files_can_still_read(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("text")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = found.stdout.split("\n")
    if Path("/sys/kernel/security/lsm").exists():
        is_known = "landlock" in Path("/sys/kernel/security/lsm").read_text()
        assert ("supported" in lines) == is_known, found.stderr
    if "supported" in lines:
        assert [line for line in lines if line.startswith("done")] == []
        assert sum(line.startswith("denied") for line in lines) == 6
        assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]
