"""Headers that decide about a request: duplicates, lists, trailers, whitespace, characters."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from inferd.gateways.http.heads import SINGLE, check_head, expects_continue
from inferd.testing import RunningDaemon
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, keyed_gateway

BODY = json.dumps({"model": "echo", "prompt": "hi"})
HOST = (b"host", b"127.0.0.1:8080")


def status(
    *headers: tuple[bytes, bytes], version: str = "1.1", target: bytes = b"/v1/models"
) -> int:
    """Return the status of the refusal of a head, or 0."""
    refusal = check_head(version, target, headers)
    assert refusal is None or (refusal.hint and refusal.message)
    return 0 if refusal is None else refusal.status


@pytest.mark.parametrize("name", SINGLE)
def test_a_header_that_decides_may_be_sent_once_and_in_ascii(name: bytes) -> None:
    others = [] if name == b"host" else [HOST]
    assert status(*others, (name, b"1")) == 0
    assert status(*others, (name, b"1"), (name, b"1")) == 400
    assert status(*others, (name, b"1\xa0")) == 400


def test_other_headers_may_be_repeated_and_have_other_characters() -> None:
    assert status(HOST, (b"accept", b"a"), (b"accept", b"\xe9"), (b"x-forwarded-for", b"\xff")) == 0


@pytest.mark.parametrize(
    "host", [b"", b"a", b"A_b.c-d:80", b"a.:", b"[::1]", b"[fe80::1%25eth0]:1", b"127.0.0.1"]
)
def test_a_host_with_or_without_a_port_is_read(host: bytes) -> None:
    assert status((b"host", host)) == 0


@pytest.mark.parametrize(
    "host",
    [b"localhost, a", b"localhost a", b"a@localhost", b"[::1]a", b"[::1]:8a", b"a/b", b"a:b"],
)
def test_a_malformed_host_is_refused(host: bytes) -> None:
    assert status((b"host", host)) == 400


def test_only_http_1_0_may_lack_a_host() -> None:
    assert (status(), status(version="1.0")) == (400, 0)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (b"http://127.0.0.1:8080/v1/models", 0),
        (b"http://127.0.0.1:8080", 0),
        (b"http://evil.example/v1/models", 400),
        (b"http://127.0.0.1:8080@evil.example/", 400),
        (b"/v1/models?next=http://evil.example", 0),
    ],
)
def test_the_target_names_no_other_host_than_the_header(target: bytes, found: int) -> None:
    assert status(HOST, target=target) == found


@pytest.mark.parametrize(
    ("codings", "version", "found"),
    [
        ([b"chunked"], "1.1", 0),
        ([b"Chunked"], "1.1", 0),
        ([b"gzip, chunked"], "1.1", 501),
        ([b"gzip", b"chunked"], "1.1", 501),
        ([b"chunked"], "1.0", 400),
    ],
)
def test_chunked_is_the_only_transfer_coding(
    codings: list[bytes], version: str, found: int
) -> None:
    headers = [(b"transfer-encoding", coding) for coding in codings]
    assert status(HOST, *headers, version=version) == found


@pytest.mark.parametrize(
    ("values", "version", "found", "continues"),
    [
        ([], "1.1", 0, False),
        ([b"100-Continue"], "1.1", 0, True),
        ([b"100-continue, 100-continue"], "1.1", 0, True),
        ([b"100-continue", b"pay"], "1.1", 417, True),
        ([b"pay"], "1.0", 0, False),
        ([b"100-continue"], "1.0", 0, False),
    ],
)
def test_100_continue_is_the_only_expectation(
    values: list[bytes], version: str, found: int, continues: bool
) -> None:
    headers = [HOST, *((b"expect", value) for value in values)]
    assert status(*headers, version=version) == found
    assert expects_continue(version, headers) is continues


@pytest.mark.parametrize("version", ["0.9", "2.0"])
def test_another_version_is_refused(version: str) -> None:
    assert status(HOST, version=version) == 505


# Over sockets.


class Keyed(NamedTuple):
    """A gateway, and a key of it."""

    running: RunningGateway
    key: str


@pytest.fixture(scope="module")
def keyed(daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with keyed_gateway(daemon, tmp_path_factory.mktemp("keys"), ["ada"]) as (running, keys):
        yield Keyed(running, keys["ada"])


def exchange(running: RunningGateway, head: str, body: str = "") -> list[tuple[int, Any]]:
    """Send a request; return the status and JSON of each response until the connection ends."""
    with socket.create_connection((running.host, running.port), timeout=CALL_S_MAX) as sock:
        sock.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n" + body.encode())
        found = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
    responses = [
        each.partition("\r\n\r\n") for each in re.split(r"HTTP/1\.1 (?=\d{3} )", found)[1:]
    ]
    return [(int(line[:3]), json.loads(text) if text else None) for line, _, text in responses]


def post(more: str, host: str = "Host: 127.0.0.1\n") -> str:
    return f"POST /v1/completions HTTP/1.1\n{host}Connection: close\n{more}"


LENGTH = f"Content-Length: {len(BODY)}\n"
CHUNKS = f"{len(BODY):x}\r\n{BODY}\r\n0\r\n"


@pytest.mark.parametrize(
    "trailer", ["Authorization: Bearer {key}", "X-Api-Key: {key}", "authorization:Bearer {key}"]
)
def test_a_key_in_a_trailer_is_not_a_key(keyed: Keyed, trailer: str) -> None:
    head = post("Transfer-Encoding: chunked\nTrailer: Authorization\n")
    body = CHUNKS + trailer.format(key=keyed.key) + "\r\n\r\n"
    [(status, error)] = exchange(keyed.running, head, body)
    assert status == 401 and "the request has no key" in error["error"]["message"]


@pytest.mark.parametrize(
    "trailer",
    [
        "Authorization: Bearer x",
        "Host: evil.example",
        "Origin: https://evil.example",
        "Content-Type: text/plain\r\nCookie: a=b",
        "Content-Encoding: gzip",
        "Sec-Fetch-Site: cross-site",
        "Connection: keep-alive",
        "Expect: pay",
    ],
)
def test_trailers_change_nothing(keyed: Keyed, trailer: str) -> None:
    """Neither for the request that they end nor for the next one on the connection."""
    key = f"Authorization: Bearer {keyed.key}\nTransfer-Encoding: chunked\n"
    second = f"{post(key)}\n".replace("\n", "\r\n") + f"{CHUNKS}\r\n"
    first = post(key).replace("Connection: close\n", "")
    answers = exchange(keyed.running, first, f"{CHUNKS}{trailer}\r\n\r\n{second}")
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["choices"][0]["text"] == "hi"


def test_a_trailer_cannot_change_the_length_of_its_body(keyed: Keyed) -> None:
    head = post(f"Authorization: Bearer {keyed.key}\nTransfer-Encoding: chunked\n")
    [(status, _)] = exchange(keyed.running, head, f"{CHUNKS}Content-Length: 5\r\n\r\n")
    assert status == 400


def test_long_trailers_end_the_connection(keyed: Keyed) -> None:
    head = post(f"Authorization: Bearer {keyed.key}\nTransfer-Encoding: chunked\n")
    [(status, _)] = exchange(keyed.running, head, f"{CHUNKS}X: {'x' * 70_000}\r\n\r\n")
    assert status == 431


@pytest.mark.parametrize(
    ("headers", "found", "problem"),
    [
        ("Authorization: Bearer x\n{key}", 400, "several Authorization headers"),
        ("{key}Authorization: Bearer x\n", 400, "several Authorization headers"),
        ("{key}Authorization:\n", 400, "several Authorization headers"),
        ("X-Api-Key: x\nX-Api-Key: x\n", 400, "several X-Api-Key headers"),
        ("{key}Host: 127.0.0.1\n", 400, "several Host headers"),
        ("{key}Content-Type: text/plain\nContent-Type: a/b\n", 400, "several Content-Type"),
        ("{key}Origin: http://a\nOrigin: http://b\n", 400, "several Origin headers"),
        ("Authorization: Bearer\n {token}\n", 400, "headers of the request are malformed"),
        ("Authorization : Bearer {token}\n", 400, "headers of the request are malformed"),
        ("Authorization: Bearer \xa0{token}\n", 400, "other characters than ASCII"),
        ("Authorization: Bearer {token}, Bearer x\n", 401, "not known"),
        ("Authorization: Bearer x, Bearer {token}\n", 401, "not known"),
        ("{key}Transfer-Encoding: chunked\n", 400, "headers of the request are malformed"),
        ("{key}Content-Length: 1\n", 400, "headers of the request are malformed"),
        ("{key}Expect: pay\n", 417, "another expectation"),
        ("{key}Content-Encoding: identity\nContent-Encoding: gzip\n", 415, "gzip"),
    ],
)
def test_a_request_that_two_programs_may_read_differently_is_refused(
    keyed: Keyed, headers: str, found: int, problem: str
) -> None:
    token = keyed.key
    text = headers.format(key=f"Authorization: Bearer {token}\n", token=token)
    [(status, error)] = exchange(keyed.running, post(LENGTH + text), BODY)
    assert (status, problem in error["error"]["message"]) == (found, True), error
    assert "(" in error["error"]["message"] or found == 415, "a hint"


@pytest.mark.parametrize(
    "head",
    [
        post("{key}", host=""),
        post("{key}").replace("/v1/completions", "http://evil.example/v1/completions"),
        post("{key}").replace("HTTP/1.1", "HTTP/2.0"),
        "CONNECT evil.example:80 HTTP/1.1\nHost: evil.example:80\n{key}",
    ],
)
def test_a_request_for_another_host_or_version_is_refused(keyed: Keyed, head: str) -> None:
    key = f"Authorization: Bearer {keyed.key}\n"
    [(status, error)] = exchange(keyed.running, head.format(key=key), "")
    assert status in (400, 505) and error["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        "Authorization:\tBearer {token} \t\n",
        "authorization: bearer  {token}\n",
        "X-Api-Key: {token}\t\n",
        "X-Api-Key: x\nAuthorization: Bearer {token}\n",
        "Authorization: Basic eA==\nX-Api-Key: {token}\n",
    ],
)
def test_a_key_is_read_without_the_whitespace_around_it(keyed: Keyed, headers: str) -> None:
    """`Authorization: Bearer` comes before `X-Api-Key`."""
    head = post(LENGTH + headers.format(token=keyed.key))
    assert [status for status, _ in exchange(keyed.running, head, BODY)] == [200]


def test_headers_of_proxies_decide_nothing(http: RunningGateway) -> None:
    forwarded = "X-Forwarded-Host: evil.example\nX-Forwarded-Proto: https\n"
    forwarded += "X-Forwarded-For: 10.0.0.1\nForwarded: host=evil.example;proto=https\n"
    json_type = f"{LENGTH}Content-Type: application/json\n{forwarded}"
    allowed = exchange(http, post(f"{json_type}Origin: http://127.0.0.1\n"), BODY)
    refused = [
        exchange(http, post(f"{json_type}Origin: {origin}\n"), BODY)
        for origin in ("https://evil.example", "https://127.0.0.1", "http://evil.example")
    ]
    assert [allowed[0][0], *(each[0][0] for each in refused)] == [200, 403, 403, 403]


@pytest.mark.parametrize("connection", ["close, keep-alive", "close\nConnection: keep-alive"])
def test_close_comes_before_keep_alive(keyed: Keyed, connection: str) -> None:
    """Else the connection would stay open, and no end would be read."""
    key = f"Authorization: Bearer {keyed.key}\n"
    head = post(LENGTH + key).replace("Connection: close", f"Connection: {connection}")
    assert [status for status, _ in exchange(keyed.running, head, BODY)] == [200]


def test_an_old_client_gets_no_100_continue(keyed: Keyed) -> None:
    head = post(LENGTH + f"X-Api-Key: {keyed.key}\nExpect: 100-continue\n")
    old = head.replace("HTTP/1.1", "HTTP/1.0")
    assert [status for status, _ in exchange(keyed.running, old, BODY)] == [200]
    assert [status for status, _ in exchange(keyed.running, head, BODY)] == [100, 200]
