"""The authority's files, and TLS between members whose certificates are right or wrong."""

from __future__ import annotations

import asyncio
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.gateways.fleet.certificates import (
    DATA,
    ENTRY,
    Authority,
    KeyFiles,
    Role,
    entry_context,
    failure_reason,
    node_context,
    read_certificate,
    refusal_reason,
    server_name,
)
from tests.gateways.fleet.members import DAYS, certificates


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("fleet") / "keys", "a", "b")


def mode(path: Path) -> int:
    return os.stat(path).st_mode & 0o777


def test_keys_are_their_owners_alone_and_certificates_are_for_all(folder: Path) -> None:
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.glob("*.key")} == {0o600}
    assert {mode(path) for path in folder.glob("*.pem")} == {0o644}
    assert len(list(folder.iterdir())) == 8


def test_an_authority_that_exists_is_kept(folder: Path) -> None:
    before = (folder / "authority.pem").read_bytes()
    assert not Authority(folder).open_or_create()
    assert (folder / "authority.pem").read_bytes() == before


def test_an_authority_without_its_key_issues_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "authority.pem").write_bytes((folder / "authority.pem").read_bytes())
    with pytest.raises(InvalidArgument, match="No such file"):
        Authority(tmp_path).open_or_create()
    (tmp_path / "authority.key").write_text("not a key")
    with pytest.raises(InvalidArgument, match="is not the key"):
        Authority(tmp_path).open_or_create()


@pytest.mark.parametrize("name", ["", "A", "a.b", "../a", "authority", "entry", "a" * 64])
def test_other_names_than_labels_of_hosts_are_refused(folder: Path, name: str) -> None:
    authority = Authority(folder)
    authority.open_or_create()
    with pytest.raises(InvalidArgument, match="cannot be the name"):
        authority.issue(name, Role.NODE, 1)


def test_a_certificate_is_valid_for_its_days(folder: Path) -> None:
    left = read_certificate(folder / "a.pem").not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=DAYS - 1) < left <= timedelta(days=DAYS)


async def handshake(
    server: ssl.SSLContext, client: ssl.SSLContext, node: str = "a"
) -> tuple[str, str | None]:
    """Connect over loopback; return why the client failed, or the negotiated protocol."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server)
    try:
        port = listening.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client, server_hostname=server_name(node)
        )
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        answered = await reader.read(1)
        writer.transport.abort()
        if not answered:  # with TLS 1.3 a server's refusal comes after the client's handshake
            return "refused", None
        return "", tls.selected_alpn_protocol()
    except OSError as exc:
        return failure_reason(exc, node), None
    finally:
        listening.close()


@pytest.mark.asyncio
async def test_an_entry_and_a_node_of_one_authority_connect(folder: Path) -> None:
    client = entry_context(folder, ENTRY, DATA)
    assert await handshake(node_context(folder, "a"), client) == ("", DATA)


@pytest.mark.asyncio
async def test_a_node_with_the_certificate_of_another_is_refused(folder: Path) -> None:
    client = entry_context(folder, ENTRY, DATA)
    reason, _ = await handshake(node_context(folder, "b"), client)
    assert "is not that of a" in reason


@pytest.mark.asyncio
async def test_a_node_is_not_an_entry(folder: Path) -> None:
    assert "must be an entry's" in refusal_reason(folder, "b")
    client = entry_context(folder, "b", DATA)
    reason, _ = await handshake(node_context(folder, "a"), client)
    assert reason == "refused"


@pytest.mark.asyncio
async def test_another_authority_is_refused_by_both(folder: Path, tmp_path: Path) -> None:
    other = certificates(tmp_path / "other", "a")
    client = entry_context(folder, ENTRY, DATA)
    reason, _ = await handshake(node_context(other, "a"), client)
    assert "does not come from the entry's authority" in reason
    stranger = entry_context(other, ENTRY, DATA)
    stranger.load_verify_locations(folder / "authority.pem")
    reason, _ = await handshake(node_context(folder, "a"), stranger)
    assert reason == "refused"


@pytest.mark.asyncio
async def test_a_client_without_a_certificate_is_refused(folder: Path) -> None:
    client = ssl.create_default_context(cafile=folder / "authority.pem")
    client.set_alpn_protocols([DATA])
    reason, _ = await handshake(node_context(folder, "a"), client)
    assert reason == "refused"


def expire(folder: Path, name: str, role: Role) -> None:
    """Replace a certificate by one that expired ten days ago."""
    authority = Authority(folder)
    authority.open_or_create()
    authority.issue(name, role, 30, since=datetime.now(UTC) - timedelta(days=40))


@pytest.mark.asyncio
async def test_an_expired_certificate_is_refused_by_its_owner_and_by_the_other_side(
    tmp_path: Path,
) -> None:
    folder = certificates(tmp_path / "keys", "a")
    node, entry = node_context(folder, "a"), entry_context(folder, ENTRY, DATA)
    expire(folder, "a", Role.NODE)
    expire(folder, ENTRY, Role.ENTRY)
    with pytest.raises(InvalidArgument, match="expired on") as caught:
        node_context(folder, "a")
    assert "--renew" in caught.value.hint
    for context, name in ((node, "a"), (entry, ENTRY)):
        files = KeyFiles.of(folder, name)
        context.load_cert_chain(files.certificate, files.key)  # as if it had expired meanwhile
    reason, _ = await handshake(node, entry)
    assert "the node's certificate has expired" in reason
    renewed = Authority(folder)
    renewed.open_or_create()
    renewed.issue("a", Role.NODE, 30)
    reason, _ = await handshake(node_context(folder, "a"), entry)
    assert reason == "refused"
    assert "which has expired" in refusal_reason(folder, ENTRY)


def test_others_that_can_read_a_key_are_reported(folder: Path, tmp_path: Path) -> None:
    copy = certificates(tmp_path / "copy", "a")
    (copy / "a.key").chmod(0o640)
    with pytest.raises(InvalidArgument, match="other users can read"):
        node_context(copy, "a")


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="a file is missing") as caught:
        node_context(folder, "c")
    assert "c.pem" in caught.value.hint


def test_a_key_of_another_certificate_is_reported(tmp_path: Path) -> None:
    copy = certificates(tmp_path / "copy", "a", "b")
    KeyFiles.of(copy, "a").key.write_bytes(KeyFiles.of(copy, "b").key.read_bytes())
    with pytest.raises(InvalidArgument, match="cannot be used"):
        node_context(copy, "a")
