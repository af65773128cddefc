"""The configuration file of an entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.gateways.fleet.config import read_config

NODE = '[nodes.a]\naddress = "10.0.0.2:7878"\n'


def written(folder: Path, text: str) -> Path:
    file = folder / "fleet.toml"
    file.write_text(text)
    return file


def test_relative_paths_begin_at_the_files_folder(tmp_path: Path) -> None:
    text = 'certificates = "keys"\nsocket = "run/s"\nstate-dir = "/var/x"\nsocket-mode = "0660"\n'
    config = read_config(written(tmp_path, text + NODE))
    assert config.certificates == tmp_path / "keys"
    assert config.socket == tmp_path / "run/s"
    assert config.state_dir == Path("/var/x")
    assert config.socket_mode == 0o660
    assert str(config.addresses["a"]) == "10.0.0.2:7878"
    assert read_config(written(tmp_path, NODE), Path("/given")).socket == Path("/given")


def test_nodes_may_come_from_ray_alone(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, 'ray = "10.0.0.1:6379"'))
    assert config.settings.ray == "10.0.0.1:6379" and config.addresses == {}


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", "127.0.0.1:4634"),
        ("metrics = 9000\n", "127.0.0.1:9000"),
        ("metrics = 9000.0\nconnections-max = 8.0\n", "127.0.0.1:9000"),
        ('metrics = "off"\n', "off"),
        ('metrics = "/run/fleet.metrics"\n', "/run/fleet.metrics"),
        ('metrics = "0.0.0.0:9000"\nmetrics-network = "any"\n', "0.0.0.0:9000"),
    ],
)
def test_the_address_of_the_metrics_has_the_daemons_forms(
    tmp_path: Path, text: str, address: str
) -> None:
    assert str(read_config(written(tmp_path, text + NODE)).metrics) == address


@pytest.mark.parametrize(
    ("text", "name", "word"),
    [
        ('copies = "ASYNC"\n', "copies", "async"),
        ('copies = " Off"\n', "copies", "off"),
        ('users = "Accounts"\n', "users", "accounts"),
        ('metrics-network = "LoopBack"\n', "metrics_network", "loopback"),
    ],
)
def test_words_are_read_in_any_case(tmp_path: Path, text: str, name: str, word: str) -> None:
    assert getattr(read_config(written(tmp_path, text + NODE)).settings, name) == word


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "0 nodes"),
        ("[nodes]", "0 nodes"),
        (NODE + "addres = 1", "addres"),
        ("sockt = 1\n" + NODE, "sockt"),
        ('[nodes.a]\naddress = "10.0.0.2"', "nodes.a"),
        ('[nodes.a]\naddress = ":1"', "nodes.a"),
        ('[nodes.a]\naddress = "h:70000"', "nodes.a"),
        ('socket-mode = "rw"\n' + NODE, "socket-mode"),
        ('users = "others"\n' + NODE, "users"),
        ("connections-max = 0\n" + NODE, "connections-max"),
        ('metrics = "host:1"\n' + NODE, "metrics: 'host:1' is not an address"),
        ('metrics = "0.0.0.0:9000"\n' + NODE, "other machines could read"),
        ("[", "fleet.toml"),
        ("#" + "x" * (1 << 20), "more than"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, cause: str) -> None:
    with pytest.raises(InvalidArgument, match=cause):
        read_config(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_config(tmp_path / "missing.toml")
