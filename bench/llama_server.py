"""The build and the process of llama-server, from the source that llama-cpp-python vendors.

Owns `${XDG_CACHE_HOME:-~/.cache}/inferd/llama-server/` and the server process. The llama-cpp-python
version is pinned. With the same compiler, Release and native, both sides run the same kernels.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.build_engine import (
    CACHE_DIR,
    PIP,
    ROOT,
    SDIST_SHA256,
    compiler_env,
    compiler_options,
    cpu_features,
    fetch_sdist,
    pinned_version,
    run_logged,
)

from .clients import MEDIA_MARKER, LlamaServerClient, llama_server_client
from .machine import MODEL, THREADS

LOG = ROOT / ".cache" / "llama-server-build.log"
START_S_MAX = 60
DEFINITIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "GGML_NATIVE=ON",
    "CMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # the binaries are moved out of the build folder
    "LLAMA_BUILD_UI=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF",  # it would be downloaded
    "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_APP=OFF",
)
FLAGS = ["-t", str(THREADS), "-tb", str(THREADS), "--no-kv-unified"]
FLAGS += ["--no-ui", "--no-slots", "--log-disable"]
NO_CACHES = ("--cache-ram", "0", "--no-cache-prompt")
"""Flags for prompts that are all new, where llama-server's caches could only cost time."""


def binary() -> Path:
    """Return the server's binary; build it if this machine does not have it."""
    hashed_parts = SDIST_SHA256 + cpu_features() + "".join([*DEFINITIONS, *compiler_options()])
    home = CACHE_DIR / "llama-server" / hashlib.sha256(hashed_parts.encode()).hexdigest()[:16]
    if not (home / "llama-server").exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        print("building llama-server, about 5 minutes, once per machine", flush=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
            _build(Path(scratch)).rename(home)
    return home / "llama-server"


def _build(scratch: Path) -> Path:
    version = pinned_version()
    with tarfile.open(fetch_sdist(version)) as archive:
        archive.extractall(scratch, filter="data")
    source = scratch / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    env = _with_cmake()
    configure = ["cmake", "-S", str(source), "-B", str(scratch / "build"), "-G", "Ninja"]
    configure += [f"-D{definition}" for definition in DEFINITIONS]
    run_logged(configure, env, "configuring llama-server", LOG)
    build = ["cmake", "--build", str(scratch / "build"), "--target", "llama-server"]
    run_logged(build, env, "building llama-server", LOG)
    return scratch / "build" / "bin"


def _with_cmake() -> dict[str, str]:
    """Return an environment whose PATH has CMake and Ninja, from PyPI where they are missing."""
    missing = [tool for tool in ("cmake", "ninja") if not shutil.which(tool)]
    if missing:
        subprocess.run([*PIP, "install", "--quiet", *missing], check=True)
    env = compiler_env()
    path = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return {**env, "PATH": path} if missing else env


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class LlamaServer:
    """A running llama-server."""

    port: int
    process: psutil.Process
    cache: bool

    def client(self, slot: int = -1) -> AbstractAsyncContextManager[LlamaServerClient]:
        """Connect a program, which is served in *slot* if given."""
        return llama_server_client(self.port, slot, cache=self.cache)


@asynccontextmanager
async def running(
    slots: int, ctx_size: int, flags: Sequence[str] = (), model: Path = MODEL
) -> AsyncIterator[LlamaServer]:
    """Run llama-server on *model*, with *ctx_size* tokens of context per slot."""
    port = _free_port()
    command = [str(binary()), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", str(slots), "-c", str(slots * ctx_size), *FLAGS, *flags]
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "LLAMA_MEDIA_MARKER": MEDIA_MARKER},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(START_S_MAX):
            await _healthy(process, port)
        cache = "--no-cache-prompt" not in flags
        yield LlamaServer(port, psutil.Process(process.pid), cache)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _healthy(process: asyncio.subprocess.Process, port: int) -> None:
    while not await _answers_ok(port):
        if process.returncode is not None:
            raise SystemExit(f"llama-server ended with status {process.returncode}")
        await asyncio.sleep(0.1)


async def _answers_ok(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    status = await reader.readline()
    writer.close()
    return b" 200 " in status
