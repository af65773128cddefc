"""The separate process that loads the engine and reads model files.

It is separate because a library that was built for another CPU crashes the process that loads it.

`python -m inferd.daemon.doctor.checks.engine_child` reads a JSON list from standard input: an array
for each file, with its path, its backend, or "" for the file's default one, and a graph's device.
It writes JSON objects to standard output, one per line: first the engine's, then one per path.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from ....backends import ENGINES, backend_of_file, declared_tensors, function_of
from ....backends.errors import InferdError
from ....backends.model_spec import CPU, DEVICE_OPTION, ModelSpec

FAILURE_CHARACTERS_MAX = 300


def main() -> None:
    """Report the engine, then each file."""
    files = msgspec.json.decode(sys.stdin.buffer.read(), type=list[tuple[str, str, str]])
    _write_line(_engine())
    for file in files:
        _write_line(_file(*file))


def _engine() -> dict[str, Any]:
    from llama_cpp import llama_cpp as lib

    from ....backends.llama.loading.devices import devices, has_broken_amx

    lib.llama_backend_init()
    return {
        "system_info": lib.llama_print_system_info().decode(errors="replace"),
        "gpu": bool(lib.llama_supports_gpu_offload()),
        "devices": devices(),
        "broken_amx": has_broken_amx(),
        "media_failure": _media_failure(),
    }


def _media_failure() -> str:
    """Return the reason why libmtmd, which reads images and sounds, cannot be loaded, or an empty
    text.
    """
    try:
        importlib.import_module("llama_cpp.mtmd_cpp")
    except Exception as exc:  # the binding raises what its loader does, and errors of its own
        return " ".join(str(exc).split())[:FAILURE_CHARACTERS_MAX] or type(exc).__name__
    return ""


def _file(path: str, backend: str, device: str) -> dict[str, Any]:
    backend = backend or backend_of_file(path)
    try:
        if ENGINES[backend].graphs:
            _check_graph(backend, path, device)
        else:
            _check_gguf(path)
    except InferdError as exc:
        return {"path": path, "error": exc.message, "hint": exc.hint}
    return {"path": path}


def _check_gguf(path: str) -> None:
    """Check the headers of a model's files, and with them that no file is truncated."""
    from ....backends.llama.loading.gguf_check import open_model_file, read_gguf, read_parts

    with open_model_file(path) as fd:
        read_parts(path, read_gguf(fd, os.path.basename(path)))


def _check_graph(backend: str, path: str, device: str) -> None:
    """Check that the engine of a graph is installed and has its device, and the header of its file,
    if the engine has a reader for it.
    """
    function_of(backend, "load")
    if ENGINES[backend].declared:
        declared_tensors(backend, Path(path))
    if device not in ("", CPU):
        spec = ModelSpec(name=path, backend=backend, options={DEVICE_OPTION: device})
        function_of(backend, "check_device")(spec)


def _write_line(report: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
