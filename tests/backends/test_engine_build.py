"""Which engine is built for which machine; nothing is built here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_engine", ROOT / "tools/build_engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_engine"] = module
    spec.loader.exec_module(module)
    return module


def test_an_engine_for_a_gpu_has_its_option_and_a_wheel_of_its_own(build: ModuleType) -> None:
    plain, cuda = build.Variant(False, ""), build.Variant(False, "cuda")
    assert set(cuda.cmake_args()) - set(plain.cmake_args()) == {"-DGGML_CUDA=on"}
    assert build.wheel_dir("1.0", cuda) != build.wheel_dir("1.0", plain)
    assert build.wheel_dir("1.0", cuda) != build.wheel_dir("1.0", build.Variant(True, "cuda"))


def test_make_passes_the_gpu_on_and_sets_up_anew_where_another_was_built(tmp_path: Path) -> None:
    def commands(*arguments: str) -> str:
        command = ["make", "-n", "demo", f"VENV={tmp_path}/venv", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "build_engine.py  --gpu cuda" in commands("GPU=cuda")
    assert "--gpu" not in commands()
    (tmp_path / "venv").mkdir()
    for stamp in ("venv", "engine-light", "install"):
        (tmp_path / "venv" / f".stamp-{stamp}").touch()
    assert "build_engine" not in commands()
    assert "--gpu cuda" in commands("GPU=cuda")
