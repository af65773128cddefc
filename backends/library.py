"""The pinned llama.cpp, without loading it: its version, the command that installs it, and the
bounds on the lines that it logs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

LLAMA_COMMIT = "0c1e57098"
"""ggml-org/llama.cpp as vendored by llama-cpp-python 0.3.36; the library does not report it."""

LLAMA_BUILD_NUMBER = 0
"""The number of commits in llama.cpp's repository; 0 (unknown), as the source package has none."""


def install_command(extra: str) -> str:
    """Return the command that installs *extra* into this Python's environment."""
    target, python = _target(extra), shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {python} {target}"
    return f"{python} -m pip install {target}"


def _target(extra: str) -> str:
    """Return pip's argument: the folder, wheel, repository or index that inferd came from."""
    origin = _origin()
    url = str(origin.get("url", ""))
    path = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    if path and os.path.exists(path):
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return editable + shlex.quote(f"{path}[{extra}]")
    if not url or path:
        return shlex.quote(f"inferd[{extra}]")
    source = origin.get("vcs_info", {})
    address = f"{source['vcs']}+{url}@{source['commit_id']}" if source else url
    return shlex.quote(f"inferd[{extra}] @ {address}")


def _origin() -> dict[str, Any]:
    """Return the record of a direct installation (PEP 610); empty after one from an index."""
    import importlib.metadata  # 12 ms of each start, for commands that are seldom shown

    try:
        text = importlib.metadata.distribution("inferd").read_text("direct_url.json")
        found = json.loads(text or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
SYSLOG_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3}
"""As in sd-daemon(3)."""
LINES_MAX, WINDOW_S = 200, 10.0
"""The most lines in a window, and its seconds; loading a model logs about 150 lines."""
REPEAT_S = 60.0
"""An emitted line is not repeated for this long, because llama.cpp warns for each context of a
model, and estimating, loading and embedding create one each."""
REMEMBERED_MAX = 256


class LibraryLog:
    """Passes lines of level *least* and above to `write_line`, with their level. Thread-safe.

    llama.cpp has one log per process, and so has this module: `library_log`. It drops lines until a
    worker process sets `write_line`.
    """

    def __init__(self, seconds: Callable[[], float] = time.monotonic):
        self.least = LEVELS["warning"]
        self.write_line: Callable[[str, str], None] | None = None
        self._seconds = seconds
        self._emitted_at: dict[str, float] = {}
        self._window_end = 0.0
        self._lines_left = self._dropped = 0

    def log_line(self, level: str, text: str) -> None:
        """Emit a line, unless it is below `least`, a recent repetition, or over the bound."""
        if self.write_line is None or LEVELS[level] < self.least:
            return
        now = self._seconds()
        if now < self._emitted_at.get(text, -REPEAT_S) + REPEAT_S:
            return
        if now >= self._window_end:
            self._window_end, self._lines_left = now + WINDOW_S, LINES_MAX
        if not self._lines_left:
            self._dropped += 1
            return
        self._lines_left -= 1
        if len(self._emitted_at) >= REMEMBERED_MAX:
            self._emitted_at.clear()
        self._emitted_at[text] = now
        if self._dropped:
            self.write_line("warning", f"{self._dropped} lines were left out")
            self._dropped = 0
        self.write_line(level, text)


library_log = LibraryLog()
