"""The command that adds an optional part of inferd, in the way in which inferd was installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from typing import Any
from urllib.parse import unquote, urlsplit


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
