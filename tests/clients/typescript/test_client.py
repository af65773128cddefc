"""The TypeScript client: its own tests with Node.js, and its types."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.models import smollm2

from .build import CLIENT, compiled, node, run

REAL = "model"
NAMES = sorted(p.name.removesuffix(".test.ts") for p in (CLIENT / "test").glob("*.test.ts"))


def run_tests(name: str, **environment: str) -> None:
    """Run one of the client's test files."""
    file = compiled() / f"{name}.test.js"
    output = run([node(), "--test", "--test-reporter=spec", str(file)], CLIENT, **environment)
    passed, failed = (
        int(re.findall(rf"^ℹ {word} (\d+)$", output, re.M)[0]) for word in ("pass", "fail")
    )
    assert passed and not failed, output


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in NAMES if name != REAL])
def test_the_client_passes_its_tests(name: str) -> None:
    run_tests(name)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_client_chats_with_a_real_model(tmp_path: Path) -> None:
    (tmp_path / "smollm2.gguf").symlink_to(smollm2())
    run_tests(REAL, INFERD_TEST_MODELS=str(tmp_path))


def test_the_package_depends_on_msgpack_only() -> None:
    assert set(json.loads((CLIENT / "package.json").read_text())["dependencies"]) == {
        "@msgpack/msgpack"
    }


def test_the_lock_file_names_no_registry_and_states_each_package_s_hash() -> None:
    packages = json.loads((CLIENT / "package-lock.json").read_text())["packages"]
    assert not [name for name, package in packages.items() if "resolved" in package]
    assert [name for name, package in packages.items() if "integrity" not in package] == [""]


def test_no_module_is_long() -> None:
    modules = [*(CLIENT / "src").glob("*.ts"), *(CLIENT / "test").glob("*.ts")]
    assert all(len(module.read_text().splitlines()) <= 300 for module in modules)
