"""The engine: its packages and versions, whether it loads, and its build for this CPU and the
machine's GPUs.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from ....backends.library import install_command
from ....backends.memory import Device
from ...models.projectors import ProjectorChoice
from ...printable import size_text
from ..finding import Finding, fail, ok, warn

ENGINE_S_MAX = 20.0
"""Long, because the driver of a GPU takes seconds to start."""
PACKAGE = "llama-cpp-python"
MODELS_NAMED = 20
CHILD = (sys.executable, "-P", "-m", "inferd.daemon.doctor.checks.engine_child")
"""With -P, no file of the current folder is imported: root may run this in any user's folder."""
SYSTEM_INFO_FLAGS = {
    "AVX": "avx",
    "AVX2": "avx2",
    "F16C": "f16c",
    "FMA": "fma",
    "BMI2": "bmi2",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "NEON": "asimd",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}
"""Names of CPU features in llama.cpp's system info, and in /proc/cpuinfo. AMX is not compared,
because with GCC before 14 the build has to leave it out.
"""
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:==\s*([\w.+!]+))?[^;]*;\s*extra\s*==\s*['\"]daemon['\"]")


WITHOUT_AMX = "CFLAGS=-mno-amx-int8 CXXFLAGS=-mno-amx-int8 "


def _rebuild_remedy(variables: str = "") -> str:
    command = install_command("daemon")
    options = f"--force-reinstall --no-cache-dir --no-binary {PACKAGE}"
    command = command.replace(" install ", f" install {options} ", 1)
    return f"build it on this machine: `{variables}CMAKE_ARGS=-DGGML_OPENMP=OFF {command}`"


class Installed(msgspec.Struct, frozen=True):
    """The packages of `inferd[daemon]`: their versions, empty if a package is missing."""

    packages: dict[str, str]
    pinned: dict[str, str]
    """Packages that must have a certain version."""


class ModelFile(msgspec.Struct, frozen=True):
    """The file of a model, and the error of its header."""

    path: str
    error: str = ""
    hint: str = ""


class EngineReport(msgspec.Struct, frozen=True):
    """The report of a process that loaded the engine; `failure` is the cause of an early end."""

    failure: str = ""
    system_info: str = ""
    gpu: bool = False
    """Whether it was built with GPU support."""
    broken_amx: bool = False
    """Whether it was built with AMX by a compiler that breaks it; then its AMX code is not used."""
    media_failure: str = ""
    """The reason why libmtmd, which reads images and sounds, cannot be loaded."""
    devices: list[Device] = []
    files: list[ModelFile] = []

    @property
    def features(self) -> set[str]:
        """CPU features of the build, by llama.cpp's names."""
        return set(re.findall(r"(\w+) = 1", self.system_info))


def find_packages() -> Installed:
    """Return the packages that `inferd[daemon]` requires."""
    required = importlib.metadata.requires("inferd") or ()
    found = [m for m in map(_REQUIREMENT.match, required) if m is not None]
    return Installed(
        {match[1]: _version(match[1]) for match in found},
        {match[1]: match[2] for match in found if match[2]},
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_installed(installed: Installed) -> Iterator[Finding]:
    """Check that the daemon's packages are installed in the required versions."""
    missing = [name for name, version in installed.packages.items() if not version]
    if missing:
        yield warn(
            f"{', '.join(missing)}: not installed; commands work, but `inferd serve` does"
            " not run here",
            f"{install_command('daemon')}, where a daemon is to run",
        )
    else:
        yield ok("all packages of the daemon are installed")
    for name, pinned in installed.pinned.items():
        version = installed.packages[name]
        if version and version != pinned:
            yield fail(
                f"{name} {version} is installed, but this inferd requires {pinned}",
                f"pip install '{name}=={pinned}'",
            )


def probe_engine(
    files: Sequence[Path],
    command: Sequence[str] = CHILD,
    seconds: float = ENGINE_S_MAX,
    *,
    devices: Mapping[Path, tuple[str, str]] | None = None,
) -> EngineReport:
    """Load the engine and read the headers of *files* in a separate process. Of graphs whose
    backend and device are set, *devices* has both.
    """
    rows = [(str(file), *(devices or {}).get(file, ("", ""))) for file in files]
    data = msgspec.json.encode(rows)
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as exc:
        return _read(exc.stdout or b"", f"it did not answer within {seconds:g} s")
    return _read(done.stdout, _failure_of(done.returncode, done.stderr))


def _failure_of(status: int, stderr: bytes) -> str:
    if status == 0:
        return ""
    if status < 0:
        return f"it ends by {signal.Signals(-status).name}"
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ends with status {status}"


def _read(output: bytes, failure: str) -> EngineReport:
    # The last line may be incomplete, if the process was killed while it wrote.
    first, *others = output.split(b"\n")[:-1] or [b""]
    if not first:
        return EngineReport(failure=failure or "it wrote nothing")
    files = [msgspec.json.decode(line, type=ModelFile) for line in others]
    engine = msgspec.json.decode(first, type=EngineReport)
    return msgspec.structs.replace(engine, failure=failure, files=files)


def check_engine(engine: EngineReport) -> Iterator[Finding]:
    """Check that the engine loads and was built without OpenMP."""
    if engine.failure and not engine.system_info:
        yield fail(f"llama.cpp cannot be loaded: {engine.failure}", _rebuild_remedy())
    elif engine.failure:
        yield fail(
            f"llama.cpp loads, but reading the models' headers failed: {engine.failure}",
            "check the disk of models-dir",
        )
    elif "OPENMP" in engine.features:
        yield warn(
            "llama.cpp loads, but was built with OpenMP, whose threads keep a core between two"
            " steps: a single stream is about 5 % slower",
            _rebuild_remedy(WITHOUT_AMX if engine.broken_amx else ""),
        )
    elif engine.broken_amx:
        yield warn(
            "llama.cpp loads, but was built with AMX by a GCC before 14, which breaks it, so"
            " weights are not rearranged for this CPU: prompts may take longer",
            _rebuild_remedy(WITHOUT_AMX),
        )
    else:
        yield ok("llama.cpp loads")


def check_media(
    engine: EngineReport, projectors: Mapping[str, ProjectorChoice]
) -> Iterator[Finding]:
    """Check that libmtmd loads, and that the models' projectors fit."""
    if not engine.system_info:
        return
    for name, choice in projectors.items():
        if choice.refusal is not None:
            yield fail(choice.refusal.message, choice.refusal.hint)
        elif choice.note:
            yield warn(f"{name}: {choice.note}", "choose the projector, or remove these files")
    chosen = [f"{n} by {Path(c.file).name}" for n, c in projectors.items() if c.file]
    if engine.media_failure:
        affected = f", {len(chosen)} with a projector" if chosen else ""
        yield warn(
            f"libmtmd cannot be loaded: {engine.media_failure}; models read only text{affected}",
            _rebuild_remedy(),
        )
    else:
        models = "; ".join(chosen[:MODELS_NAMED]) or "no model has a projector"
        yield ok(f"libmtmd loads; images and sounds: {models}")


def cpu_flags(proc: Path = Path("/proc")) -> frozenset[str]:
    """Return the features of the first CPU, by the kernel's names."""
    for line in (proc / "cpuinfo").read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def check_cpu(engine: EngineReport, flags: frozenset[str]) -> Iterator[Finding]:
    """Compare the features of the CPU with those of the build."""
    if not engine.system_info:
        return
    unused = [n for n, f in SYSTEM_INFO_FLAGS.items() if f in flags and n not in engine.features]
    used = [name for name in SYSTEM_INFO_FLAGS if name in engine.features]
    if unused:
        yield warn(
            f"the engine was built without {', '.join(unused)}, which this CPU has, so it is"
            " slower than it could be",
            _rebuild_remedy(),
        )
    else:
        yield ok(f"{os.uname().machine}, used with {', '.join(used) or 'no extensions'}")


# GPUs.


CUDA = "build the engine for it: `CMAKE_ARGS=-DGGML_CUDA=on`, or `make install GPU=cuda` in a clone"
HIP = "build the engine for it: `CMAKE_ARGS=-DGGML_HIP=on`, or -DGGML_VULKAN=on"


class Gpus(msgspec.Struct, frozen=True):
    """Device files: of NVIDIA's driver, of AMD's compute driver, and of render nodes."""

    nvidia: list[str] = []
    amd: list[str] = []
    render: list[str] = []
    closed: list[str] = []
    """Device files that the caller may not open."""


def find_gpus(dev: Path = Path("/dev")) -> Gpus:
    """Return the device files below *dev*."""
    patterns = ("nvidia[0-9]*", "kfd", "dri/renderD*")
    nvidia, amd, render = (sorted(map(str, dev.glob(pattern))) for pattern in patterns)
    files = (*nvidia, *amd, *render)
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    return Gpus(nvidia, amd, render, closed)


def check_gpus(gpus: Gpus, engine: EngineReport | None) -> Iterator[Finding]:
    """Compare the machine's GPUs with the engine's build."""
    has_gpu_support = engine is not None and engine.gpu
    if engine is not None and engine.devices:
        devices = (
            f"{d.name} with {size_text(d.free)} of {size_text(d.total)} free"
            for d in engine.devices
        )
        yield ok(", ".join(devices))
    elif has_gpu_support and gpus.closed:
        yield warn(
            f"you may not open {', '.join(gpus.closed)}",
            "join the groups video and render; for the service: `inferd install-service --gpu`",
        )
    elif has_gpu_support:
        yield warn(
            "the engine was built for a GPU, but llama.cpp finds none and uses the CPU",
            "check that its driver is loaded (`nvidia-smi`, `rocminfo`)",
        )
    elif gpus.nvidia or gpus.amd:
        yield warn(
            f"{', '.join(gpus.nvidia + gpus.amd)} is not used: the engine was built without GPUs",
            CUDA if gpus.nvidia else HIP,
        )
    else:
        unused = f"; {', '.join(gpus.render)} is not used" if gpus.render else ""
        yield ok(f"none for computing{unused}")
