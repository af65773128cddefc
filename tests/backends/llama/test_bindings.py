"""Imports of llama-cpp-python: its low-level bindings, and not its high-level API."""

from __future__ import annotations

import subprocess
import sys

import pytest

BACKEND = "from inferd.backends.llama.loading import loader\n"
HIGH_LEVEL = "llama_cpp.llama"


def run(program: str) -> list[str]:
    command = [sys.executable, "-c", f"import sys\n{program}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_the_backend_imports_the_low_level_bindings_alone() -> None:
    modules = run(f"{BACKEND}print(*sys.modules)")

    assert "llama_cpp.llama_cpp" in modules
    assert not {HIGH_LEVEL, "jinja2", "diskcache", "multiprocessing"}.intersection(modules)


@pytest.mark.parametrize("first", [BACKEND, "import llama_cpp\n"])
@pytest.mark.parametrize(
    "use", ["from llama_cpp import Llama", "import llama_cpp\nLlama = llama_cpp.Llama"]
)
def test_a_program_with_the_backend_can_use_the_high_level_api(first: str, use: str) -> None:
    own = "from inferd.backends.llama import model\nfrom llama_cpp import llama_cpp\n"
    shown = run(
        f"{first}{use}\n{own}print(Llama.__module__, llama_cpp is model.lib)\n"
        "import llama_cpp\nprint(llama_cpp.__version__, type(llama_cpp).__name__)"
    )
    assert shown[:2] == [HIGH_LEVEL, "True"]
    assert shown[3] == "module"


def test_an_unknown_name_is_an_attribute_error() -> None:
    shown = run(
        f"{BACKEND}import llama_cpp\n"
        "print(hasattr(llama_cpp, 'nonsense'), hasattr(llama_cpp, 'nonsense'))"
    )
    assert shown == ["False", "False"]
