"""The program of docs/c.md, built as the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from inferd.backends.params import BY_NAME, read_options
from inferd.daemon.calls.models import BACKEND_DEFAULTS
from inferd.testing import RunningDaemon

from .build import CLIENT, compiler

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "c.md").read_text()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `make install` has installed the client."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [
            *("make", "-s", "-C", str(CLIENT), "install", f"CC={compiler()}", "CFLAGS=-O0"),
            *(f"BUILD={folder / 'build'}", f"PREFIX={folder}"),
        ],
        check=True,
        env={**os.environ, "DESTDIR": ""},
    )
    return folder


def test_the_page_lists_wasi_nn_backends_defaults() -> None:
    rows = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \| (-?[\d.]+|true)", PAGE, re.M)
    listed = {name: json.loads(value) for names, value in rows for name in names.split(", ")}
    read = read_options({name.strip("`"): value for name, value in listed.items()})
    assert read.values == BACKEND_DEFAULTS and not read.ignored
    assert all(BY_NAME[name].default != value for name, value in BACKEND_DEFAULTS.items())


def test_the_program_of_the_page_streams_an_answer(installed: Path, daemon: RunningDaemon) -> None:
    source, program = installed / "program.c", installed / "program"
    [code] = re.findall(r"```c\n(.*?)```", PAGE, re.S)
    source.write_text(code)
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{installed}/include"]
    libraries = [f"-L{installed}/lib", "-linferd", "-pthread"]
    subprocess.run([compiler(), *flags, str(source), *libraries, "-o", str(program)], check=True)
    for model, status, text in (("echo", 0, "Name three colours."), ("nothing", 103, "")):
        done = subprocess.run(
            [str(program), model], env=daemon.environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (status, text), done.stderr
    assert "ModelNotFound" in done.stderr
