"""The program of docs/c.md, built as the page says."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

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
