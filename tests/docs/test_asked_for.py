"""Every command of docs/asked-for.md is run, on a daemon with the configuration of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from inferd import Client
from inferd.backends.errors import Cancelled
from inferd.backends.params import BY_SPELLING
from inferd.daemon.config.access_settings import ACCESS_KEYS
from inferd.daemon.config.names import NAME_KEYS
from inferd.daemon.config.settings import SETTINGS
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd_process
from tests.gateways.http.driver import SERVING
from tests.tiny_gguf import write_tiny

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "asked-for.md").read_text()
[CONFIG] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
ROWS = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
REQUESTS = [row for row in ROWS if row[2] not in ("asked in", "---")]
PROJECTS = ("llama.cpp", "Ollama", "llama-swap", "LM Studio", "opencode")
BLOCK_S_MAX = 60.0
SESSION = "report"
"""The session of which a turn runs where the page says so."""
KEYS_OF_GATEWAY = {"requests-max", "max-tokens"}


class Place(NamedTuple):
    """The folder of the commands, and their environment."""

    folder: Path
    environment: dict[str, str]
    daemon: RunningDaemon


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A daemon and a gateway as on the page, with tiny models of its names."""
    folder = tmp_path_factory.mktemp("page")
    models = tmp_path_factory.mktemp("models")
    for name, kind in (("qwen3", "llama"), ("mixtral", "moe"), ("reranker", "bert-rank")):
        write_tiny(kind, models).rename(models / f"{name}.gguf")
    binaries = folder / "bin"
    binaries.mkdir()
    command = binaries / "inferd"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m inferd "$@"\n')
    command.chmod(0o755)
    first, second = BLOCKS[0].splitlines()
    with running_daemon(CONFIG + "\n[defaults]\nthreads = 1\n", models_dir=models) as daemon:
        environment = {
            **daemon.environment,
            "INFERD_CONFIG": str(daemon.directory / "config.toml"),
            "INFERD_MODELS_DIR": str(models),
            "INFERD_STATE_DIR": str(daemon.directory / "state"),
            "PATH": f"{binaries}:{os.environ['PATH']}",
        }
        here = Place(folder, environment, daemon)
        made = run_block(here, first)
        environment["KEY"] = made.stderr.split("only now: ")[1].strip()
        words = second.removeprefix("inferd ").removesuffix(" &").replace("8080", "0").split()
        words[words.index("keys.toml")] = str(folder / "keys.toml")
        with inferd_process(*words, socket=daemon.socket) as process:
            assert process.stderr is not None
            line = process.stderr.readline().decode()
            assert line.startswith(SERVING), line
            environment["URL"] = f"http://{line.removeprefix(SERVING).strip()}"
            try:
                yield here
            finally:
                process.kill()
                process.communicate()


def run_block(place: Place, text: str) -> subprocess.CompletedProcess[str]:
    """Run commands in one shell, which ends at the first that fails."""
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", text],
        cwd=place.folder,
        env=place.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BLOCK_S_MAX,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.timeout(300)
def test_the_commands_of_the_page_run_in_its_order(place: Place) -> None:
    outputs = []
    for block in BLOCKS[1:]:
        if SESSION not in block:
            outputs.append(run_block(place, block).stdout)
            continue
        with (
            Client(place.daemon.socket) as client,
            client.session("qwen3", session_id=SESSION) as session,
        ):
            stream = session.stream("A long report.", n_predict=4000, ignore_eos=True)
            next(iter(stream))
            outputs.append(run_block(place, block).stdout)
            with pytest.raises(Cancelled):
                "".join(stream)
    shown = "\n".join(outputs)
    assert ("another name of" in shown and '"city": "Rome"' in shown) or '"city": "Paris"' in shown
    with Client(place.daemon.socket) as client:
        pids = {model["name"]: model["pid"] for model in client.models()}
        assert pids["qwen3"] == pids["coder"] > 0


def test_a_client_with_another_context_does_not_load_the_model_again(place: Place) -> None:
    [chat] = [block for block in BLOCKS if "num_ctx" in block]
    request = chat[chat.index("curl") :]
    with Client(place.daemon.socket) as client:
        client.load_by_name("qwen3")
        before = client.show("qwen3")["pid"]
        for size in ("512", "4096", "32768", "64"):
            run_block(place, request.replace("512", size))
        assert client.show("qwen3")["pid"] == before > 0


def test_the_page_has_each_request_with_its_place() -> None:
    assert len(REQUESTS) == 41
    assert len({request for request, _, _ in REQUESTS}) == len(REQUESTS)
    for request, answer, asked in REQUESTS:
        assert asked.startswith(PROJECTS) and re.search(r"#\d+", asked), request
        assert answer


def test_the_settings_and_parameters_that_the_page_names_exist() -> None:
    tables = tomllib.loads(CONFIG)
    known = {*SETTINGS, *ACCESS_KEYS, *NAME_KEYS, *BY_SPELLING, *KEYS_OF_GATEWAY}
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)(?: = [^`]*)?`", PAGE))
    assert tables["models"]["coder"]["of"] == "qwen3"
    assert named - known == set()


def test_every_section_has_commands() -> None:
    assert all("```sh\n" in section for section in SECTIONS[1:])
