"""The listen addresses of the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferd.daemon.config.sources import ConfigError, load_config
from inferd.ipc.metrics_address import Address, parse_address


@pytest.mark.parametrize(
    ("value", "address", "text"),
    [
        ("off", Address(), "off"),
        ("OFF", Address(), "off"),
        (4000, Address("127.0.0.1", 4000), "127.0.0.1:4000"),
        ("4000", Address("127.0.0.1", 4000), "127.0.0.1:4000"),
        ("localhost:0", Address("127.0.0.1", 0), "127.0.0.1:0"),
        ("127.1.2.3:65535", Address("127.1.2.3", 65535), "127.1.2.3:65535"),
        ("[::1]:80", Address("::1", 80), "[::1]:80"),
        ("0.0.0.0:80", Address("0.0.0.0", 80), "0.0.0.0:80"),
        ("/run/metrics.sock", Address(path="/run/metrics.sock"), "/run/metrics.sock"),
        ("unix:/run/m", Address(path="/run/m"), "/run/m"),
    ],
)  # fmt: skip
def test_an_address_is_parsed_and_printed(value: Any, address: Address, text: str) -> None:
    assert parse_address(value) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "value",
    ["", "on", True, 1.5, None, -1, 65536, "example.com:80", "::1", "host", "1.2.3:4", "a.sock",
     "٣", "/" + "x" * 107, "/a\0b", "127.0.0.1:", "127.0.0.1:x", [4000]],
)  # fmt: skip
def test_an_invalid_address_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        parse_address(value)


@pytest.mark.parametrize("remote", ["0.0.0.0:4633", "[::]:4633", "192.168.0.7:4633", "8.8.8.8:80"])
def test_an_address_that_others_reach_has_to_be_allowed(remote: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"metrics": remote}, {})
    [line] = caught.value.lines
    assert remote in line and "metrics-network = 'any'" in line
    assert str(load_config({"metrics": remote, "metrics-network": "any"}, {}).metrics) == remote


@pytest.mark.parametrize("own", ["off", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "/tmp/m.sock"])
def test_an_address_of_this_machine_is_always_allowed(own: str) -> None:
    assert str(load_config({"metrics": own}, {}).metrics) == own


def test_a_file_may_name_a_port_as_a_number(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[daemon]\nmetrics = 4000\n")
    assert load_config({"config": file}, {}).metrics == Address("127.0.0.1", 4000)
    assert load_config({"config": file}, {"INFERD_METRICS": "off"}).metrics.is_off
    machine = {"INFERD_SOCKET": "/run/inferd/inferd.sock"}
    assert str(load_config({}, machine).metrics) == "127.0.0.1:4633"


def test_the_metrics_of_a_user_s_own_daemon_have_an_address_that_no_other_daemon_has() -> None:
    own = {"XDG_RUNTIME_DIR": "/run/user/7"}
    at = "/run/user/7/inferd/inferd-metrics.sock"
    assert load_config({}, own).metrics == Address(path=at)
    assert load_config({"socket": "/tmp/a.sock"}, {}).metrics == Address(path="/tmp/a-metrics.sock")
    machine = {"INFERD_SOCKET": "/run/inferd/inferd.sock", **own}
    assert load_config({}, machine).metrics == Address("127.0.0.1", 4633)
    assert load_config({"metrics": "4633"}, own).metrics == Address("127.0.0.1", 4633)


def test_a_path_that_is_too_long_for_a_socket_of_the_metrics_gives_a_free_port() -> None:
    socket = "/" + "x" * 100 + ".sock"
    assert load_config({"socket": socket}, {}).metrics == Address("127.0.0.1", 0)


def test_an_invalid_address_is_reported_with_the_other_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"metrics": "nowhere", "cores": -1}, {})
    assert sorted(line.split(":")[0] for line in caught.value.lines) == ["--cores", "--metrics"]
