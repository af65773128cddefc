"""The CUDA toolkit for building llama.cpp: the machine's, or else NVIDIA's from PyPI.

Owns `nvidia/cu13` in the site-packages of its virtual environment: the compiler, headers and
libraries that pip installs, and their missing links `lib64` and `lib*.so`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

VERSION = (13, 0)
"""The version from PyPI. It is the oldest of CUDA 13, which the most drivers support."""

PYPI = f"cuda-toolkit[{{}}]=={VERSION[0]}.{VERSION[1]}.*"
COMPILER, LIBRARIES = PYPI.format("nvcc,nvvm,crt,cccl,cudart,cublas"), PYPI.format("cudart,cublas")
FROM_PYPI = Path(sysconfig.get_path("platlib"), "nvidia", "cu13")
RPATH = "$ORIGIN/../../nvidia/cu13/lib"
"""The path from llama_cpp/lib to the libraries of `FROM_PYPI` in the same environment."""

NO_GPU_ARCHITECTURES = "80-virtual"
"""Architecture for builds without a GPU. The driver translates it for Ampere and newer GPUs."""

PROGRAM = "#include <cublas_v2.h>\nint main() { cublasHandle_t h; return cublasCreate(&h); }\n"


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver: the newest CUDA version that it supports, and its number of GPUs."""

    version: tuple[int, int]
    gpus: int


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit and the driver that runs its engines."""

    nvcc: Path | None
    """The compiler, or `None` if the toolkit comes from PyPI."""
    driver: Driver | None

    def __str__(self) -> str:
        return str(self.nvcc or f"PyPI's {VERSION[0]}.{VERSION[1]}")

    def hashed_parts(self) -> list[str]:
        """Return the part of the wheels' hash that identifies this toolkit."""
        return [str(self), self.architectures, *self._driver_args()]

    @property
    def architectures(self) -> str:
        """CMake's list of architectures. As in CMake, CUDAARCHS has precedence."""
        native = self.driver is not None and self.driver.gpus > 0
        return os.environ.get("CUDAARCHS") or ("native" if native else NO_GPU_ARCHITECTURES)

    def cmake_args(self) -> list[str]:
        """Return the CMake definitions of an engine built with this toolkit."""
        compiler = self.nvcc or FROM_PYPI / "bin" / "nvcc"
        libraries = compiler.resolve().parents[1] / "lib64"
        args = ["-DGGML_CUDA=on", f"-DCMAKE_CUDA_COMPILER={compiler}"]
        args += [f"-DCMAKE_CUDA_ARCHITECTURES={self.architectures}", *self._driver_args()]
        if self.nvcc is None:
            return [*args, f"-DCUDAToolkit_ROOT={FROM_PYPI}", _rpath(RPATH)]
        return [*args, _rpath(str(libraries))] if libraries.is_dir() else args

    def _driver_args(self) -> list[str]:
        """Return the definition by which llama.cpp uses no virtual memory, if it cannot use any.

        Virtual memory links the driver, and such an engine loads only where there is a driver. The
        toolkit from PyPI has no stub of the driver to link.
        """
        return [] if self.driver and self.nvcc else ["-DGGML_CUDA_NO_VMM=on"]

    def get_compiler(self, pip: list[str]) -> None:
        """Install the toolkit for a build: 600 MB if it comes from PyPI.

        :raises SystemExit: the driver is too old for the toolkit from PyPI.
        """
        if self.nvcc is not None:
            return
        if self.driver and self.driver.version < VERSION:
            raise SystemExit(
                f"the driver runs CUDA {_text(self.driver.version)}, the toolkit on PyPI is"
                f" {_text(VERSION)}: install a toolkit for this driver, with cuBLAS, and have its"
                " nvcc on PATH; or a newer driver"
            )
        print(f"no whole CUDA toolkit here: getting {self} (600 MB)", flush=True)
        subprocess.run([*pip, "install", "--quiet", COMPILER], check=True)
        link_libraries(FROM_PYPI)

    def get_libraries(self, pip: list[str]) -> None:
        """Install the libraries that a built engine loads: 500 MB if they come from PyPI."""
        if self.nvcc is None:
            subprocess.run([*pip, "install", "--quiet", LIBRARIES], check=True)


def find() -> Toolkit:
    """Return this machine's toolkit, or that of PyPI if there is none or it is incomplete."""
    home = os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    named = [os.environ.get("CUDACXX"), shutil.which("nvcc"), f"{home}/bin/nvcc"]
    nvcc = next((path for path in map(Path, filter(None, named)) if builds(path)), None)
    return Toolkit(nvcc, driver())


def builds(nvcc: Path) -> bool:
    """Return whether *nvcc* exists and builds a program with cuBLAS. The build takes seconds."""
    if not os.access(nvcc, os.X_OK):
        return False
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "uses_cublas.cu")
        source.write_text(PROGRAM)
        command = [str(nvcc), str(source), "-lcublas", "-lcublasLt", "-o", f"{scratch}/uses_cublas"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def driver() -> Driver | None:
    """Return NVIDIA's driver on this machine, if there is one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, gpus = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(gpus)) != 0:
        gpus.value = 0
    return Driver((version.value // 1000, version.value % 1000 // 10), gpus.value)


def link_libraries(root: Path) -> None:
    """Link the libraries of the toolkit at *root* to the names that nvcc's linker expects."""
    links = {root / "lib64": "lib"}
    for library in (root / "lib").glob("lib*.so.*"):
        links[library.with_name(library.name.partition(".so.")[0] + ".so")] = library.name
    for link, target in links.items():
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def _rpath(directory: str) -> str:
    """Return the definition of the rpath, because llama-cpp-python sets only $ORIGIN."""
    return f"-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-rpath,'{directory}'"


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
