"""llama-server's parser of answers, in a process without a model.

The program is compiled beside the build of llama-server, whose library it uses, once per machine.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from bench.llama_server import binary
from tools.build_engine import compiler_env, fetch_sdist, pinned_version

SOURCE = Path(__file__).with_name("parse.cpp")
_HEADERS = ("common", "include", "ggml/include")


class LlamaParser:
    """A running parser."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def parse(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request; `parse.cpp` has the form of both."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp's parser has exited with {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def running() -> Iterator[LlamaParser]:
    """Run the parser; build it and llama-server if this machine does not have them."""
    with subprocess.Popen(
        [_program()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield LlamaParser(process)
        finally:
            process.kill()


def _program() -> Path:
    library = binary().parent
    program = library / f"parse-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            _compile(Path(scratch), library).rename(program)
    return program


def _compile(scratch: Path, library: Path) -> Path:
    _extract_headers(scratch)
    env, target = compiler_env(), scratch / "parse"
    compiler = shlex.split(env.get("CXX", "c++"))
    includes = [f"-I{scratch / folder}" for folder in _HEADERS]
    libraries = [f"-L{library}", f"-Wl,-rpath,{library}", "-lllama-common", "-lllama"]
    libraries += ["-lggml", "-lggml-base"]
    command: Sequence[str | Path] = [*compiler, "-std=c++17", "-O1", *includes, SOURCE]
    subprocess.run([*command, "-o", target, *libraries], env=env, check=True)
    return target


def _extract_headers(target: Path) -> None:
    with tarfile.open(fetch_sdist(pinned_version())) as archive:
        for member in archive:
            inner = PurePosixPath(member.name.partition("/vendor/llama.cpp/")[2])
            if inner.suffix != ".h" or not str(inner).startswith(_HEADERS):
                continue
            file = archive.extractfile(member)
            assert file is not None
            (target / inner).parent.mkdir(parents=True, exist_ok=True)
            (target / inner).write_bytes(file.read())
