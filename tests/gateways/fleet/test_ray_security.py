"""A Ray cluster with TLS and a token: its members work, and others are refused with a reason."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from inferd import Client
from inferd.gateways.fleet.ray_cluster.keys import issue_for_members, ray_environment
from tests.daemon.command_line import inferd, inferd_process
from tests.echo import echo_model
from tests.gateways.fleet.members import certificates
from tests.gateways.fleet.ray_members import RAY_S_MAX, RayFleet, RayHead, free_port, nodes_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself has many


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    """A fleet of one node, in a cluster with TLS and a token."""
    folder = tmp_path_factory.mktemp("fleet")
    keys, head = folder / "keys", RayHead()
    members = (f"--ray=entry={head.host}", f"--ray=a={head.host}")
    made = inferd("fleet", "init", "a", "--certificates", str(keys), *members)
    assert made.exit_code == 0, made.stderr
    with ExitStack() as stack:
        stack.callback(head.close)
        head.start(ray_environment(keys, "entry"))
        fleet = RayFleet(folder, echo_model("echo"), head, "a")
        stack.callback(fleet.close)
        fleet.start_node("a")
        fleet.start_entry(f'ray = "{head.address}"\n')
        yield fleet


def test_a_cluster_with_tls_and_a_token_serves_a_turn(fleet: RayFleet) -> None:
    assert "serves entries on 127.0.0.1:" in fleet.until_deployed("a")
    wait_until(lambda: nodes_of(fleet) == {"a": True}, RAY_S_MAX)
    with Client(fleet.socket) as client, client.session("echo") as session:
        assert session.chat("Say hello.") == "Say hello."


def others(fleet: RayFleet, folder: Path) -> dict[str, Path]:
    """Return folders of certificates that the head refuses, by the reason for that."""
    found = {
        reason: folder / name
        for name, reason in (
            ("plain", "wants TLS: copy the folder `ray`"),
            ("stranger", "has a certificate of another authority"),
            ("intruder", "refuses this member's certificate"),
            ("wrong-token", "refuses this member's token"),
        )
    }
    for path in found.values():
        certificates(path, "b")
    host = fleet.cluster.host
    for name in ("stranger", "intruder"):
        issue_for_members(folder / name, {"b": [host], "entry": [host]}, 30, renew=False)
    own = fleet.keys / "ray"
    shutil.copy(own / "authority.pem", folder / "intruder" / "ray")
    shutil.copytree(own, folder / "wrong-token" / "ray")
    for suffix in ("pem", "key"):
        shutil.copy(own / f"a.{suffix}", folder / "wrong-token" / "ray" / f"b.{suffix}")
    (folder / "wrong-token" / "ray" / "token").write_text("wrong")
    return found


def test_others_are_refused_with_a_reason_in_one_line(fleet: RayFleet, tmp_path: Path) -> None:
    address = fleet.cluster.address
    with ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[bytes]:
            process = inferd_process(*arguments)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        expected = []
        for reason, keys in others(fleet, tmp_path).items():
            place = (f"--listen=127.0.0.1:{free_port()}", f"--state-dir={keys / 'state'}")
            node = start(
                *("fleet", "node", "b", "--ray", address, "--certificates", str(keys), *place)
            )
            line = f"Ray does not supervise node b: the head of Ray at {address} {reason}"
            expected.append((node, line))
        config = tmp_path / "fleet.toml"
        config.write_text(
            f'ray = "{address}"\ncertificates = "wrong-token"\nmetrics = "off"\n'
            'socket = "fleet.sock"\nstate-dir = "state"\n'
        )
        line = f"Ray does not answer at {address}: the head of Ray at {address} refuses this"
        expected.append((start("fleet", "serve", "--config", str(config)), line))
        for process, line in expected:
            assert process.stderr is not None
            assert process.stderr.readline().decode().startswith(line)


def test_files_that_are_missing_are_named_at_once(fleet: RayFleet, tmp_path: Path) -> None:
    certificates(tmp_path, "a")
    shutil.copytree(fleet.keys / "ray", tmp_path / "ray")
    (tmp_path / "ray" / "token").unlink()
    arguments = ("--ray", fleet.cluster.address, "--listen", "127.0.0.1:7878")
    found = inferd("fleet", "node", "a", "--certificates", str(tmp_path), *arguments)
    assert found.exit_code == 1 and "Ray's files of a in" in found.stderr


def test_a_node_is_removed_with_the_files_of_this_machine(fleet: RayFleet) -> None:
    assert fleet.end_command("a") == 0
    keys = str(fleet.keys)
    removed = inferd("fleet", "remove", "a", "--ray", fleet.cluster.address, "--certificates", keys)
    assert removed.exit_code == 0, removed.stderr
