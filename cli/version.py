"""`inferd --version`: the installed versions, and the version of the running daemon."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from .. import __version__
from ..backends.errors import InferdError
from ..backends.library import LLAMA_BUILD_NUMBER, LLAMA_COMMIT, install_command
from .client import socket_of
from .one_shot import OneShotClient
from .output import write, write_json


def show_versions(socket: Path | None, as_json: bool) -> None:
    """Print the versions of inferd, the protocol and llama.cpp."""
    from ..ipc.messages import PROTOCOL_VERSION

    versions = {
        "inferd": __version__,
        "protocol": "{}.{}".format(*PROTOCOL_VERSION),
        **(_running(socket) or _installed()),
    }
    if as_json:
        write_json(versions)
        return
    write(f"inferd {versions['inferd']}, protocol {versions['protocol']}")
    write(_engine_text(versions))


def _engine_text(versions: dict[str, Any]) -> str:
    if not versions["llama_commit"]:
        return f"engine not installed: {install_command('daemon')}"
    build = f"build {versions['llama_build_number']}, " if versions["llama_build_number"] else ""
    return f"llama.cpp {build}commit {versions['llama_commit']} ({versions['engine']})"


def _running(socket: Path | None) -> dict[str, Any] | None:
    path = socket_of(socket)
    with contextlib.suppress(InferdError), OneShotClient(path) as client:
        hello = client.server
        return {
            "llama_build_number": hello.llama_build_number,
            "llama_commit": hello.llama_commit,
            "engine": f"{hello.software} running at {path}",
        }
    return None


def _installed() -> dict[str, Any]:
    if importlib.util.find_spec("llama_cpp") is None:
        return {"llama_build_number": 0, "llama_commit": "", "engine": ""}
    version = importlib.metadata.version("llama_cpp_python")
    return {
        "llama_build_number": LLAMA_BUILD_NUMBER,
        "llama_commit": LLAMA_COMMIT,
        "engine": f"llama-cpp-python {version}, no daemon running",
    }
