"""Tiny models with random weights, one or two of each architecture of the pinned llama.cpp.

Owns `${XDG_CACHE_HOME:-~/.cache}/inferd/architectures/`. A test program of llama.cpp saves them. It
is compiled against the library of the installed engine; `stubs/` has the part of llama.cpp's common
library that it uses, which the engine lacks. A file is renamed into place, so it is complete.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from tests.tiny_gguf import write_tiny
from tools.build_engine import CACHE_DIR, SDIST_SHA256, fetch_sdist, pinned_version

__all__ = ("CHOSEN", "MISSING", "every_model", "find_models", "get_models")

MISSING = "the models of the architectures are missing: run `make architectures`"
CHOSEN = {
    "llama-dense": "plain attention",
    "gemma4-dense": "a sliding window, and layers that read the KV states of others",
    "gpt-oss-moe": "experts, beside a sliding window",
    "deepseek2-moe": "multi-head latent attention",
    "mamba2-dense": "a recurrent state",
    "qwen35-dense": "a hybrid of recurrent states and attention, with M-RoPE",
    "qwen4exp-moe": "a hybrid whose embeddings llama.cpp would read past their end",
    "kimi-linear-moe": "a hybrid of recurrent states and latent attention",
    "minicpm3-dense": "latent attention, and keys whose rotation depends on the context's size",
    "qwen2vl-dense": "M-RoPE, of a model that also reads images",
    "dream-dense": "a diffusion process: refused",
}
"""One file for each kind of memory, and what it has."""
WRITTEN = ("bert", "gemma4", "rwkv7")
"""Architectures whose models the program cannot save. `tests.tiny_gguf` writes them."""
SEED, STDEV = 1, 0.3
"""With a third of this deviation, the default, a wrong token changes the next logits by only 1e-4;
with twice as much, attention reads single cells.
"""
PROGRAM = "tests/test-llama-archs.cpp"
_HEADERS = re.compile(r"(src|include|ggml/include)/[\w-]+\.h")
_VENDORED = "vendor/llama.cpp/"
_STUBS = Path(__file__).parent / "stubs"
_ALL = "all"
"""A file that exists once every model was saved."""


def folder() -> Path:
    """Return the folder of the models. Its name depends on all that determines their contents."""
    digest = hashlib.sha256(f"{SDIST_SHA256} {SEED} {STDEV}".encode())
    return CACHE_DIR / "architectures" / digest.hexdigest()[:16]


def find_models(names: Sequence[str]) -> list[Path] | None:
    """Return the files of these models, or None if one is missing."""
    files = [folder() / f"{name}.gguf" for name in names]
    return files if all(file.is_file() for file in files) else None


def get_models(names: Sequence[str]) -> list[Path]:
    """Return the files of these models; save them first if one is missing. Takes 15 s at most."""
    _write()
    found = find_models(names)
    if found is None:
        kinds = "|".join(sorted({name.rpartition("-")[0] for name in names}))
        _save(f"^({kinds})$")
        found = find_models(names)
    if found is None:
        raise SystemExit(f"llama.cpp saves no model for one of {', '.join(names)}")
    return found


def every_model() -> list[Path]:
    """Return the files of all models (0.9 GB); save them first if they are missing."""
    _write()
    if not (folder() / _ALL).exists():
        _save("")
        (folder() / _ALL).touch()
    return sorted(folder().glob("*.gguf"))


def _write() -> None:
    """Write the models that the program cannot save; this takes less than a second."""
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder().parent, prefix=".get-") as scratch:
        for kind in WRITTEN:
            write_tiny(kind, Path(scratch)).rename(folder() / f"{kind}-dense.gguf")


def _save(architectures: str) -> None:
    """Save the models of those *architectures* that match, a regular expression."""
    print("saving tiny models of llama.cpp's architectures", flush=True)
    with tempfile.TemporaryDirectory(dir=folder().parent, prefix=".get-") as scratch:
        program = _compile(Path(scratch))
        saved = Path(scratch, "saved")
        saved.mkdir()
        command = [str(program), "-s", str(SEED), "-d", str(STDEV), "-o", str(saved)]
        command += ["-a", architectures] if architectures else []
        subprocess.run(command, check=True)
        for file in saved.glob("*.gguf"):
            file.rename(folder() / file.name)


def _compile(scratch: Path) -> Path:
    """Compile the program that saves the models, and return its path."""
    library = _library()
    source = scratch / "llama.cpp"
    _extract(source)
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if not shutil.which(compiler[0]):
        raise SystemExit(f"no C++ compiler {compiler[0]!r} found; on Debian: apt install g++")
    folders = [_STUBS, source / "include", source / "ggml" / "include", source / "src"]
    command = [*compiler, "-std=c++17", "-O1", *(f"-I{each}" for each in folders)]
    command += [str(source / PROGRAM), "-o", str(scratch / "program")]
    command += [f"-L{library}", f"-Wl,-rpath,{library}"]
    command += ["-lllama", "-lggml", "-lggml-base", "-lggml-cpu"]
    subprocess.run(command, check=True)
    return scratch / "program"


def _library() -> Path:
    """Return the folder of the installed engine's libraries."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise SystemExit("the engine is not installed: run `make install`")
    return Path(found.origin).parent / "lib"


def _extract(target: Path) -> None:
    """Extract the program and the headers from the engine's source distribution."""
    with tarfile.open(fetch_sdist(pinned_version())) as archive:
        for member in archive:
            name = member.name.partition(_VENDORED)[2]
            file = archive.extractfile(member)
            if file is not None and (name == PROGRAM or _HEADERS.fullmatch(name)):
                path = target / PurePosixPath(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())


def main() -> None:
    """Save the models of `CHOSEN`, or with `--all` every one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="the models of every architecture")
    files = every_model() if parser.parse_args().all else get_models(list(CHOSEN))
    print(f"{len(files)} models in {folder()}")


if __name__ == "__main__":
    main()
