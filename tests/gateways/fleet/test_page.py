"""docs/fleet.md: its commands run as they stand, apart from addresses; its table is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec

from inferd.gateways.fleet.config import EntrySettings, read_config
from inferd.gateways.fleet.ray_cluster.keys import issue_for_members, ray_environment
from inferd.testing import running_daemon
from tests.daemon.command_line import inferd, inferd_process

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "fleet.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_commands_set_up_a_fleet(tmp_path: Path) -> None:
    init, node, serve, use, *_ = blocks("sh")
    with ExitStack() as stack:

        def run(line: str, **variables: str) -> str:
            program, *arguments = line.replace('"Say hello."', "Say-hello.").split()
            assert program == "inferd"
            found = subprocess.run(
                [sys.executable, "-m", "inferd", *arguments],
                cwd=tmp_path,
                env={**os.environ, **variables},
                capture_output=True,
                text=True,
            )
            assert found.returncode == 0, found.stderr
            return found.stdout

        def start(line: str, ready: str, socket: str = "") -> str:
            process = inferd_process(*line.split()[1:], socket=socket, cwd=tmp_path)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stderr is not None
            while ready not in (text := process.stderr.readline().decode()):
                assert text, f"{line} has ended"
            return text.split()[-1]

        assert "copy gpu-1.pem, gpu-1.key and authority.pem" in run(init)
        (config,) = blocks("toml")
        for name, address in (("gpu-1", "10.0.0.2:7878"), ("gpu-2", "10.0.0.3:7878")):
            assert address in config
            daemon = stack.enter_context(running_daemon())
            line = node.replace("gpu-1", name).replace("10.0.0.2:7878", "127.0.0.1:0")
            found = start(line, "serves entries on", daemon.socket)
            config = config.replace(address, found)
        (tmp_path / "fleet.toml").write_text(config)
        start(serve, "the fleet listens on", "")
        nodes, answer, ps = use.strip().splitlines()
        assert [line.split()[0] for line in run(nodes).splitlines()] == ["NODE", "gpu-1", "gpu-2"]
        assert run(answer).strip() == "Say-hello."
        assert run(ps).startswith("NODE")
        (drain,) = [block for block in blocks("sh") if block.startswith("inferd drain")]
        moved, undone = (run(line) for line in drain.strip().splitlines())
        assert "sessions moved from gpu-1: 0" in moved
        assert "node gpu-1 is used again" in undone


def test_the_commands_for_ray_and_models_have_their_options() -> None:
    lines = [line for block in blocks("sh")[4:] for line in block.splitlines()]
    lines = [line for line in lines if not line.startswith("inferd drain")]
    found = [line.split(" -- ")[0].split() for line in lines if line.startswith("inferd")]
    assert [words[:3] for words in found] == [
        ["inferd", "fleet", "init"],
        ["inferd", "fleet", "node"],
        ["inferd", "fleet", "remove"],
        ["inferd", "fleet", "copy"],
        ["inferd", "fleet", "node"],
    ]
    for words in found:
        text = inferd(*words[1:3], "--help").stdout
        for word in words:
            assert not word.startswith("--") or word in text


def test_the_variables_for_the_head_are_those_of_the_entry(tmp_path: Path) -> None:
    issue_for_members(tmp_path / "keys", {"entry": ["10.0.0.1"]}, 30, renew=False)
    found = dict(re.findall(r"(RAY_\w+)=(\S+)", PAGE.partition("ray start --head")[0]))
    environment = {name: value.replace("$PWD", str(tmp_path)) for name, value in found.items()}
    assert environment == ray_environment(tmp_path / "keys", "entry")


def test_the_table_of_keys_is_complete(tmp_path: Path) -> None:
    documented = set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE))
    settings = {field.encode_name for field in msgspec.structs.fields(EntrySettings)}
    assert settings - {"nodes"} <= documented and "`nodes.NAME.address`" in PAGE
    (config,) = blocks("toml")
    (tmp_path / "fleet.toml").write_text(config)
    assert set(read_config(tmp_path / "fleet.toml").addresses) == {"gpu-1", "gpu-2"}
