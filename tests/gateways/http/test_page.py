"""The commands and programs of docs/gateway.md, run on gateways of a daemon with the echo model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from ast import literal_eval
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import ollama
import pytest

from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.models import magika
from tests.pictures import png

CONFIG = echo_model("smollm2") + echo_model("gemma3", media=True)
CONFIG += echo_model("bge-reranker", ranks=True)
CONFIG += f"[models.magika]\nfile = {json.dumps(str(magika()))}\n"
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "gateway.md").read_text()
ADDRESS = "127.0.0.1:8080"
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
# A program with shared memory needs a key of a user of this system: see test_shared_memory.py.
PROGRAMS = [
    text for language, text in BLOCKS if language == "python" and "shared_memory" not in text
]
COMMANDS = [text.replace("\\\n", " ").strip() for language, text in BLOCKS if language == "sh"]

SHOWN = [json.loads(text).keys() for text in re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)]
"""The keys of the objects that the page shows."""


class Reader:
    """A reader of the page, who runs its commands in a folder, one after the other."""

    def __init__(self, daemon: RunningDaemon, folder: Path, stack: ExitStack):
        self._daemon, self.folder, self._stack = daemon, folder, stack
        self.running: RunningGateway | None = None
        commands = folder / "bin"
        commands.mkdir()
        script = commands / "inferd"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m inferd "$@"\n')
        script.chmod(0o755)
        self._environment = daemon.environment | {"PATH": f"{commands}:{os.environ['PATH']}"}

    def run_line(self, line: str) -> str:
        """Run a command and return its output; a gateway stays, at a free port."""
        words = line.split()
        if words[:2] == ["inferd", "gateway"] and "--new-key" not in words:
            assert words[-2:] == ["--listen", ADDRESS]
            options = [str(self.folder / w) if w == "keys.toml" else w for w in words[2:-2]]
            self.running = self._stack.enter_context(gateway(self._daemon, *options))
            return ""
        done = subprocess.run(
            ["sh", "-c", self.at_gateway(line)],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def at_gateway(self, text: str) -> str:
        return text.replace(ADDRESS, self.running.address) if self.running else text


@pytest.fixture
def reader(daemon: RunningDaemon, tmp_path: Path) -> Iterator[Reader]:
    with ExitStack() as stack:
        yield Reader(daemon, tmp_path, stack)


def test_the_programs_of_the_page_print_the_answer(
    reader: Reader, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (reader.folder / "cat.png").write_bytes(png(4, 4))
    monkeypatch.chdir(reader.folder)
    reader.run_line(COMMANDS[0])
    with ExitStack() as clients:
        for program in PROGRAMS:
            names: dict[str, Any] = {}
            exec(reader.at_gateway(program), names)
            clients.push(names["client"])
    *texts, response = capsys.readouterr().out.splitlines()
    assert texts == ["Say hello."] * 3 + ["1", "What is this?"]
    [output] = literal_eval(response)["outputs"]
    assert (output["datatype"], output["shape"]) == ("FP32", [1, 214])


def test_the_commands_of_the_page_run_in_their_order(reader: Reader) -> None:
    for block in COMMANDS:
        for line in block.splitlines():
            output = reader.run_line(line)
            if line.startswith("curl"):
                assert json.loads(output).keys() in SHOWN, output
    assert (reader.folder / "keys.toml").read_text().startswith("[keys.ada]")
    unknown = "curl -s -o /dev/null -w '%{http_code}' 127.0.0.1:8080/v1/models"
    assert reader.run_line(unknown) == "401", "the last gateway of the page asks for a key"


def test_the_environment_of_the_clients_is_enough(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.run_line(COMMANDS[0])
    assert f"`OLLAMA_HOST={ADDRESS}`" in PAGE and "`ANTHROPIC_BASE_URL`" in PAGE
    address = reader.at_gateway(ADDRESS)
    monkeypatch.setenv("OLLAMA_HOST", address)
    monkeypatch.setenv("ANTHROPIC_BASE_URL", f"http://{address}")
    with ollama.Client() as client:
        assert "magika" in [each.model for each in client.list().models]
    with anthropic.Anthropic(api_key="none") as other:
        assert "magika" in [each.id for each in other.models.list()]
