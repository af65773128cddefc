"""The choice of the engine's build options and CUDA toolkit for a machine; nothing is built."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools import build_engine, cuda_toolkit
from tools.build_engine import Variant, options_against_amx, wheel_dir
from tools.cuda_toolkit import Driver, Toolkit

ROOT = Path(__file__).resolve().parents[2]
FROM_PYPI = Toolkit(nvcc=None, driver=None)
NO_PIP = ["false"]
"""A stand-in for pip that must not be called."""


@pytest.fixture(autouse=True)
def no_architectures_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDAARCHS", "CUDACXX", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def compiler(path: Path, status: int) -> Path:
    """Write a compiler that exits with *status*; nvcc fails where cuBLAS is missing."""
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_an_engine_for_a_gpu_has_its_own_options_and_wheel() -> None:
    plain, cuda = Variant(False, None), Variant(False, FROM_PYPI)
    assert set(plain.cmake_args()) < set(cuda.cmake_args())
    assert "-DGGML_CUDA=on" in cuda.cmake_args()
    assert not any("CUDA" in argument for argument in plain.cmake_args())
    dirs = {wheel_dir("1.0", variant) for variant in (plain, cuda, Variant(True, FROM_PYPI))}
    assert len(dirs) == 3


def test_make_and_the_pages_build_with_the_definitions_of_one_file() -> None:
    (light,) = Variant(False, None).cmake_args()
    (full,) = Variant(True, None).cmake_args()
    file = ROOT / "tools" / "engine.cmake"
    assert light == f"-C{file}" and full == "-DGGML_OPENMP=OFF"
    for page in ("README.md", "docs/operations.md"):
        assert "CMAKE_ARGS=\"-C'$PWD/tools/engine.cmake'\"" in (ROOT / page).read_text()
    values = dict(re.findall(r"^set\((\S+) (\S+) CACHE", file.read_text(), re.M))
    assert values == {
        "GGML_OPENMP": "OFF",
        "LLAVA_BUILD": "ON",
        "MTMD_VIDEO": "OFF",
        "CMAKE_PROJECT_llama.cpp_INCLUDE": '"${CMAKE_CURRENT_LIST_DIR}/llama_only.cmake"',
    }
    assert file.with_name("llama_only.cmake").exists()


def test_the_wheel_depends_on_toolkit_driver_and_architectures_not_on_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = compiler(tmp_path / "bin/nvcc", 0)
    toolkits = [FROM_PYPI, Toolkit(nvcc, None), Toolkit(nvcc, Driver((13, 0), 0))]
    dirs = {wheel_dir("1.0", Variant(False, toolkit)) for toolkit in toolkits}
    dirs.add(wheel_dir("1.0", Variant(False, Toolkit(nvcc, Driver((13, 0), 1)))))
    assert len(dirs) == 4
    kept = wheel_dir("1.0", Variant(False, FROM_PYPI))
    monkeypatch.setattr(cuda_toolkit, "FROM_PYPI", tmp_path)
    assert wheel_dir("1.0", Variant(False, FROM_PYPI)) == kept
    monkeypatch.setenv("CUDAARCHS", "86")
    assert wheel_dir("1.0", Variant(False, FROM_PYPI)) != kept


def test_a_light_wheel_depends_on_the_definitions_of_its_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def dirs() -> list[Path]:
        return [wheel_dir("1.0", Variant(full, None)) for full in (False, True)]

    light, full = dirs()
    changed = tmp_path / "engine.cmake"
    changed.write_text(build_engine.LIGHT.read_text() + "set(GGML_LTO ON)\n")
    monkeypatch.setattr(build_engine, "LIGHT_FILES", (changed, *build_engine.LIGHT_FILES[1:]))
    assert dirs()[0] != light and dirs()[1] == full


def test_an_engine_without_libmtmd_is_built_again() -> None:
    assert "llama_cpp.mtmd_cpp" in build_engine.LOAD_CHECK


@pytest.mark.parametrize(
    ("features", "version", "is_left_out"),
    [
        ("flags: avx2 amx_tile amx_int8", "12.2.0", True),
        ("flags: avx2 amx_tile amx_int8", "14.2.0", False),
        ("flags: avx2", "12.2.0", False),
        ("", "", False),
    ],
)
def test_amx_is_left_out_where_the_compiler_would_break_it(
    features: str, version: str, is_left_out: bool
) -> None:
    assert bool(options_against_amx(features, version)) == is_left_out


@pytest.mark.parametrize(
    ("driver", "architectures"),
    [(None, "80-virtual"), (Driver((13, 0), 0), "80-virtual"), (Driver((13, 0), 2), "native")],
)
def test_it_is_built_for_the_present_gpus_or_for_all_recent_ones(
    driver: Driver | None, architectures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit = Toolkit(None, driver)
    assert f"-DCMAKE_CUDA_ARCHITECTURES={architectures}" in toolkit.cmake_args()
    monkeypatch.setenv("CUDAARCHS", "75;86")
    assert "-DCMAKE_CUDA_ARCHITECTURES=75;86" in toolkit.cmake_args()


def test_an_engine_built_without_a_driver_does_not_need_one_to_load(tmp_path: Path) -> None:
    nvcc, driver = compiler(tmp_path / "bin/nvcc", 0), Driver((13, 0), 1)
    without = "-DGGML_CUDA_NO_VMM=on"
    assert without in Toolkit(nvcc, None).cmake_args()
    assert without in Toolkit(None, driver).cmake_args(), "PyPI's has no libcuda.so to link"
    assert without not in Toolkit(nvcc, driver).cmake_args()


def test_a_toolkit_without_cublas_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, whole = compiler(tmp_path / "half/bin/nvcc", 1), compiler(tmp_path / "whole/bin/nvcc", 0)
    monkeypatch.setenv("PATH", f"{half.parent}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "none"))
    assert cuda_toolkit.find().nvcc is None
    monkeypatch.setenv("CUDA_PATH", str(whole.parents[1]))
    assert cuda_toolkit.find().nvcc == whole
    monkeypatch.setenv("CUDACXX", str(half))
    assert cuda_toolkit.find().nvcc == whole
    cuda_toolkit.find().get_compiler(NO_PIP)


def test_a_driver_too_old_for_the_toolkit_on_pypi_is_refused_before_a_download() -> None:
    with pytest.raises(SystemExit, match=r"driver runs CUDA 12\.2, .* PyPI is 13\.0: install"):
        Toolkit(None, Driver((12, 2), 1)).get_compiler(NO_PIP)


def test_the_libraries_of_pypi_get_the_names_that_a_linker_looks_for(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libcublas.so.13"
    library.parent.mkdir()
    library.write_text("a library")
    for _ in range(2):  # again, after a newer release of the packages
        cuda_toolkit.link_libraries(tmp_path)
        assert (tmp_path / "lib64" / "libcublas.so").read_text() == "a library"


def test_the_engine_finds_the_libraries_of_pypi_in_its_own_environment() -> None:
    site = cuda_toolkit.FROM_PYPI.parents[1]
    found = cuda_toolkit.RPATH.replace("$ORIGIN", str(site / "llama_cpp" / "lib"))
    assert Path(found).resolve() == (cuda_toolkit.FROM_PYPI / "lib").resolve()
    assert any(cuda_toolkit.RPATH in argument for argument in FROM_PYPI.cmake_args())


def test_make_passes_the_gpu_on_and_builds_again_for_another_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for handed_on in ("MAKEFLAGS", "GPU"):  # by `make test GPU=cuda`
        monkeypatch.delenv(handed_on, raising=False)

    def commands(*arguments: str) -> str:
        command = ["make", "-n", "demo", f"VENV={tmp_path}/venv", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "tools.build_engine  --gpu cuda" in commands("GPU=cuda")
    assert "--gpu" not in commands()
    (tmp_path / "venv").mkdir()
    for stamp in ("venv", "engine-light", "install"):
        (tmp_path / "venv" / f".stamp-{stamp}").touch()
    assert "build_engine" not in commands()
    assert "--gpu cuda" in commands("GPU=cuda")
