"""Build and installation of llama-cpp-python from its source distribution, once per machine.

Owns `${XDG_CACHE_HOME:-~/.cache}/inferd/{sdist,wheels}` and `.cache/engine-build.log`. A wheel is
cached under a hash of its version, variant and Python, and of the CPU's features, because llama.cpp
is built for this CPU. Run it with the Python of the virtual environment that gets the engine. It
needs only a C++ compiler: CMake, Ninja and, for a GPU, the CUDA toolkit are installed from PyPI if
they are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from . import cuda_toolkit
from .cuda_toolkit import Toolkit

ROOT = Path(__file__).resolve().parent.parent
CACHE_DIR = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inferd"
LOG = ROOT / ".cache" / "engine-build.log"
PACKAGE = "llama-cpp-python"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
"""Hash of the pinned version's sdist; `make bench` builds llama-server from the same file."""

OWN_THREADS = "-DGGML_OPENMP=OFF"
"""Without OpenMP llama.cpp uses its own threads, see `backends.llama.threads`."""

LIGHT = ROOT / "tools" / "engine.cmake"
"""The definitions of the light build, `OWN_THREADS` among them."""
LIGHT_FILES = (LIGHT, ROOT / "tools" / "llama_only.cmake")
FLAG_VARIABLES = ("CFLAGS", "CXXFLAGS")
LOAD_CHECK = "import llama_cpp, llama_cpp.mtmd_cpp; llama_cpp.llama_backend_init()"
LOG_LINES_SHOWN = 30
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


@dataclass(frozen=True)
class Variant:
    """A variant of the build: all of llama-cpp-python or only libllama and libmtmd, and the GPU
    toolkit.
    """

    full: bool
    cuda: Toolkit | None

    def cmake_args(self) -> list[str]:
        """Return the CMake definitions of this variant."""
        cuda = self.cuda.cmake_args() if self.cuda else []
        return [OWN_THREADS if self.full else f"-C{LIGHT}", *cuda]

    def hashed_parts(self) -> list[str]:
        """Return the part of the wheels' hash that identifies this variant."""
        definitions = [] if self.full else [file.read_text() for file in LIGHT_FILES]
        cuda = self.cuda.hashed_parts() if self.cuda else []
        return [str(self), OWN_THREADS, *definitions, *cuda]

    def __str__(self) -> str:
        return ("full" if self.full else "light") + ("-cuda" if self.cuda else "")


def pinned_version() -> str:
    """Return the version that pyproject.toml pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["optional-dependencies"]["daemon"]:
        name, _, version = requirement.partition("==")
        if name == PACKAGE and version:
            return str(version)
    raise SystemExit(f"pyproject.toml does not pin {PACKAGE} with ==")


def cpu_features() -> str:
    """Return the CPU's model and instruction sets; a wheel for another CPU may not run."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = ("model name", "flags", "Features", "CPU part")
    first = text.split("\n\n")[0].splitlines()
    return platform.machine() + "\n".join(line for line in first if line.startswith(fields))


def options_against_amx(features: str, compiler_version: str) -> list[str]:
    """Return the compiler's options against AMX, for GCC before 14 on a CPU that has AMX.

    Most of these versions store only a part of the tiles' configuration (GCC bug 114098), so that
    the first prompt ends the engine by SIGSEGV. An old clang gets the options too; its engine is
    only slower.
    """
    major = int(compiler_version.partition(".")[0] or 0)
    if "amx_tile" not in features.split() or major >= 14:
        return []
    return ["-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"]


def compiler_options() -> list[str]:
    """Return the options that the compiler needs beside CMake's."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-dumpfullversion", "-dumpversion"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        found = ""  # `need_compiler` reports that there is none
    return options_against_amx(cpu_features(), found.strip())


def compiler_env() -> dict[str, str]:
    """Return the environment with `compiler_options`, from which CMake takes them."""
    flags = {name: [os.environ.get(name, ""), *compiler_options()] for name in FLAG_VARIABLES}
    return {**os.environ, **{name: " ".join(found).strip() for name, found in flags.items()}}


def wheel_dir(version: str, variant: Variant) -> Path:
    """Return the folder of this machine's wheel of *variant*."""
    hashed_parts = [version, *variant.hashed_parts(), os.environ.get("CMAKE_ARGS", "")]
    hashed_parts += [
        *compiler_options(),
        cpu_features(),
        str(sys.implementation.cache_tag),
        platform.libc_ver()[1],
    ]
    return CACHE_DIR / "wheels" / hashlib.sha256(json.dumps(hashed_parts).encode()).hexdigest()[:16]


def installed(wheel_hash: str) -> bool:
    """Return whether this environment already has the wheel with that hash."""
    marker = Path(sys.prefix) / ".engine"
    return marker.exists() and marker.read_text() == wheel_hash and loads()


def loads() -> bool:
    """Return whether the installed engine loads, in a separate process, which may crash."""
    check = subprocess.run([sys.executable, "-c", LOAD_CHECK], capture_output=True, check=False)
    return check.returncode == 0


def install(wheel: Path, cuda: Toolkit | None) -> bool:
    """Install *wheel* into this environment; return whether it loads."""
    if cuda:
        cuda.get_libraries(PIP)
    subprocess.run(
        [*PIP, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)], check=True
    )
    # Its dependencies, in the versions of its metadata: small binary wheels.
    needs = importlib.metadata.distribution(PACKAGE).requires or []
    plain = [need for need in needs if "extra ==" not in need]
    subprocess.run([*PIP, "install", "--quiet", *plain], check=True)
    return loads()


def fetch_sdist(version: str) -> Path:
    """Return the source distribution; it is downloaded once per machine and checked.

    :raises SystemExit: its SHA-256 is not the pinned one.
    """
    directory = CACHE_DIR / "sdist"
    path = directory / f"{PACKAGE.replace('-', '_')}-{version}.tar.gz"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        print(f"getting the source of {PACKAGE} {version} (77 MB)", flush=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            command = [*PIP, "download", "--no-deps", "--no-binary", PACKAGE, "--dest", scratch]
            subprocess.run([*command, f"{PACKAGE}=={version}"], check=True)
            check_sha256(Path(scratch, path.name))
            Path(scratch, path.name).rename(path)
    return path


def check_sha256(path: Path) -> None:
    """Check that the source distribution has the pinned hash."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SDIST_SHA256:
        raise SystemExit(f"{path.name}: SHA-256 is {digest}, not {SDIST_SHA256}")


class Progress:
    """The progress of a build: one changing line on a terminal, otherwise a line every 10 %."""

    def __init__(self, what: str, out: IO[str]):
        self.what, self.out, self.start_s, self.shown = what, out, time.monotonic(), -10

    def read_line(self, line: str) -> None:
        """Read a line of Ninja's output, and show the progress of its [n/m] counter."""
        found = re.match(r"\s*\[(\d+)/(\d+)\]", line)
        if not found:
            return
        done, total = int(found[1]), int(found[2])
        percent = 100 * done // total
        text = (
            f"{self.what}: {percent:3} % [{done}/{total}] {time.monotonic() - self.start_s:.0f} s"
        )
        if self.out.isatty():
            print(f"\r{text}\033[K", end="\n" if done == total else "", file=self.out, flush=True)
        elif percent >= self.shown + 10:
            self.shown = percent - percent % 10
            print(text, file=self.out, flush=True)


def run_logged(command: list[str], env: dict[str, str], what: str, log: Path) -> None:
    """Run a build with its output in *log* and its progress on the terminal.

    :raises SystemExit: the build failed; the end of the log was printed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress(what, sys.stdout)
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            progress.read_line(line)
    if process.returncode != 0:
        fail(f"{what}: failed with status {process.returncode}", log)


def fail(message: str, log: Path) -> NoReturn:
    """Exit with *message* and the last lines of *log*."""
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
    raise SystemExit(f"\n{tail}\n\n{message}\nthe whole log: {log}")


def need_compiler() -> None:
    """Check early that there is a C++ compiler."""
    if not any(map(shutil.which, (os.environ.get("CXX", "c++").split()[0], "g++", "clang++"))):
        raise SystemExit("no C++ compiler found; on Debian or Ubuntu: sudo apt install g++")


def build(sdist: Path, variant: Variant, target: Path) -> Path:
    """Build the wheel, store it in *target* and return it."""
    minutes = "a quarter of an hour on two cores" if variant.cuda else "2 to 5 minutes"
    print(f"building llama.cpp ({variant}), {minutes}, once per machine", flush=True)
    args = [os.environ.get("CMAKE_ARGS", ""), shlex.join(variant.cmake_args())]
    # Without Ninja, scikit-build-core would fall back to make without parallel jobs.
    env = {**compiler_env(), "CMAKE_ARGS": " ".join(args), "SKBUILD_NINJA_MAKE_FALLBACK": "0"}
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        # --no-cache-dir: pip's cache of built wheels ignores CMAKE_ARGS.
        command = [*PIP, "wheel", "--verbose", "--no-deps", "--no-cache-dir", "--wheel-dir"]
        run_logged([*command, scratch, str(sdist)], env, "building llama.cpp", LOG)
        (wheel,) = Path(scratch).glob("*.whl")
        return wheel.rename(target / wheel.name)


def main() -> None:
    """Install the engine into this environment, from the cached wheel if there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all of llama-cpp-python")
    parser.add_argument("--gpu", choices=("", "cuda"), default="", help="build for this GPU too")
    arguments = parser.parse_args()
    cuda = cuda_toolkit.find() if arguments.gpu == "cuda" else None
    variant, version = Variant(arguments.full, cuda), pinned_version()
    folder = wheel_dir(version, variant)
    if installed(folder.name):
        return
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None or not install(wheel, cuda):
        need_compiler()
        if cuda:
            cuda.get_compiler(PIP)
        wheel = build(fetch_sdist(version), variant, folder)
        if not install(wheel, cuda):
            raise SystemExit(f"{wheel.name} was built, but does not load: {LOAD_CHECK}")
    (Path(sys.prefix) / ".engine").write_text(folder.name)
    print(f"{PACKAGE} {version} ({variant}) is installed", flush=True)


if __name__ == "__main__":
    main()
