"""What the engine says of itself and of model files, told by a process of its own: a library that
was built for another CPU ends the process that loads it.

`python -m inferd.daemon.doctor.checks.engine_child` reads a JSON list of paths from standard input.
Standard output gets one JSON object a line: first the engine's, then one for each path.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from ....backends.errors import LoadFailed


def main() -> None:
    """Tell of the engine, then of each file."""
    paths = msgspec.json.decode(sys.stdin.buffer.read(), type=list[str])
    _tell(_engine())
    for path in paths:
        _tell(_file(path))


def _engine() -> dict[str, Any]:
    from llama_cpp import llama_cpp as lib

    from ....backends.llama.loading.devices import devices

    lib.llama_backend_init()
    return {
        "system_info": lib.llama_print_system_info().decode(errors="replace"),
        "gpu": bool(lib.llama_supports_gpu_offload()),
        "devices": devices(),
    }


def _file(path: str) -> dict[str, Any]:
    """Read a model's headers: they say how long the files must be."""
    from ....backends.llama.loading.gguf_check import open_model_file, read_gguf, read_parts

    try:
        fd = open_model_file(path)
        try:
            read_parts(path, read_gguf(fd, os.path.basename(path)))
        finally:
            os.close(fd)
    except LoadFailed as exc:
        return {"path": path, "error": exc.message, "hint": exc.hint}
    return {"path": path}


def _tell(told: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
