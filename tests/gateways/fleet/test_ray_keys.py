"""The files for TLS and the token of a Ray cluster, and the variables by which Ray uses them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509

from inferd.backends.errors import InvalidArgument
from inferd.gateways.fleet.certificates import read_certificate
from inferd.gateways.fleet.ray_cluster.keys import (
    issue_for_members,
    member_in,
    members_of,
    ray_environment,
)
from tests.daemon.command_line import inferd

MEMBERS = {"entry": ["10.0.0.1", "127.0.0.1"], "gpu-1": ["gpu-1.example"]}


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    assert len(issue_for_members(tmp_path, MEMBERS, 30, renew=False)) == 2
    return tmp_path


def test_members_are_named_with_their_addresses() -> None:
    texts = ["entry=10.0.0.1", "gpu-1=gpu-1.example", "entry=127.0.0.1", "gpu-2=fd00::2"]
    assert members_of(texts) == MEMBERS | {"gpu-2": ["fd00::2"]}
    for text in ("gpu-1", "=10.0.0.1", "gpu-1=", "gpu-1=10.0.0.2:7878"):
        with pytest.raises(InvalidArgument, match="does not name a member"):
            members_of([text])


def test_a_certificate_is_for_both_sides_of_connections_and_for_the_addresses(
    certificates: Path,
) -> None:
    found = read_certificate(certificates / "ray" / "entry.pem")
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == (
        MEMBERS["entry"]
    )
    uses = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert len(list(uses)) == 2
    other = read_certificate(certificates / "ray" / "gpu-1.pem")
    names = other.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == MEMBERS["gpu-1"]


def test_what_exists_stays_unless_it_is_renewed(certificates: Path) -> None:
    ray = certificates / "ray"
    before = {file.name: file.read_bytes() for file in ray.iterdir()}
    assert issue_for_members(certificates, MEMBERS, 30, renew=False) == []
    assert {file.name: file.read_bytes() for file in ray.iterdir()} == before
    assert issue_for_members(certificates, {}, 30, renew=True) == []
    renewed = issue_for_members(certificates, {"gpu-1": ["10.0.0.2"]}, 30, renew=True)
    assert renewed == [str(ray / "gpu-1.pem")]
    assert (ray / "token").read_bytes() == before["token"]
    assert (ray / "authority.pem").read_bytes() == before["authority.pem"]


def test_the_variables_name_the_files_of_the_member(certificates: Path, tmp_path: Path) -> None:
    ray = certificates / "ray"
    assert ray_environment(certificates, "entry") == {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(ray / "entry.pem"),
        "RAY_TLS_SERVER_KEY": str(ray / "entry.key"),
        "RAY_TLS_CA_CERT": str(ray / "authority.pem"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(ray / "token"),
    }
    assert ray_environment(tmp_path / "other", "entry") == {}, "Ray is used as its user has set it"
    assert member_in(certificates) == "entry"
    (ray / "entry.key").unlink()
    assert member_in(certificates) == "gpu-1"


def test_files_that_cannot_be_used_are_named(certificates: Path) -> None:
    ray = certificates / "ray"
    with pytest.raises(InvalidArgument, match="No such file") as caught:
        ray_environment(certificates, "gpu-2")
    assert "inferd fleet init --ray gpu-2=ADDRESS" in caught.value.hint
    (ray / "token").chmod(0o644)
    with pytest.raises(InvalidArgument, match="other users can read the token"):
        ray_environment(certificates, "gpu-1")
    (ray / "token").unlink()
    with pytest.raises(InvalidArgument, match="No such file"):
        ray_environment(certificates, "gpu-1")


def test_the_command_makes_the_files_and_names_what_to_copy(tmp_path: Path) -> None:
    members = ("--ray", "entry=10.0.0.1", "--ray", "gpu-1=10.0.0.2")
    made = inferd("fleet", "init", "gpu-1", "--certificates", str(tmp_path), *members)
    assert made.exit_code == 0, made.stderr
    line = "ray/gpu-1.pem, ray/gpu-1.key, ray/authority.pem and ray/token"
    assert f"copy {line} to the machine of gpu-1, too" in made.stdout
    assert ray_environment(tmp_path, "gpu-1")
    authorities = {(tmp_path / f / "authority.pem").read_bytes() for f in (".", "ray")}
    assert len(authorities) == 2, "a certificate of Ray does not open a relay"
