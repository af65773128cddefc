"""Unusual HTTP: old versions, other methods, unreadable requests, and many connections."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import psutil
import pytest

from inferd.testing import RunningDaemon
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway
from tests.waiting import wait_until

HOST = "Host: 127.0.0.1\r\n"
JSON = "Content-Type: application/json\r\n"
HELLO: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}


@contextmanager
def connected(running: RunningGateway) -> Iterator[socket.socket]:
    with socket.create_connection((running.host, running.port), timeout=CALL_S_MAX) as sock:
        yield sock


def exchange(running: RunningGateway, data: str) -> tuple[str, str]:
    """Send *data*; return the head and the body of the response, which ends the connection."""
    with connected(running) as sock:
        sock.sendall(data.encode("latin-1"))
        found = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, body = found.decode().partition("\r\n\r\n")
    return head.lower(), body


def post(body: dict[str, Any], version: str = "1.1", more: str = "") -> str:
    text = json.dumps(body)
    head = f"POST /v1/chat/completions HTTP/{version}\r\n{HOST}{JSON}{more}"
    return f"{head}Content-Length: {len(text)}\r\n\r\n{text}"


def test_the_end_of_the_connection_ends_a_stream_of_http_1_0(http: RunningGateway) -> None:
    head, body = exchange(http, post({**HELLO, "stream": True}, "1.0"))
    assert " 200 ok" in head and "transfer-encoding" not in head and "connection: close" in head
    lines = body.split("\n\n")
    assert lines.pop() == "" and lines.pop() == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["choices"] for line in lines)


def test_a_whole_response_of_http_1_0_has_its_length(http: RunningGateway) -> None:
    head, body = exchange(http, post(HELLO, "1.0"))
    assert f"content-length: {len(body)}" in head
    assert json.loads(body)["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("path", ["/", "/v1/models", "/v1/models/echo", "/api/tags"])
def test_head_is_get_without_the_body(web: httpx.Client, path: str) -> None:
    head, whole = web.head(path), web.get(path)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == whole.headers[name]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/v1/models", "GET, HEAD"), ("/v1/chat/completions", "POST"), ("/api/delete", "DELETE")],
)
def test_options_and_refusals_name_the_methods_of_a_path(
    web: httpx.Client, path: str, allowed: str
) -> None:
    options, refused = web.options(path), web.patch(path)
    assert (options.status_code, options.content) == (204, b"")
    assert "content-length" not in options.headers
    assert refused.status_code == 405
    assert options.headers["allow"] == refused.headers["allow"] == allowed
    assert web.options("/v1/nothing").status_code == 404


@pytest.mark.parametrize(
    ("data", "status", "problem"),
    [
        ("nonsense\r\n\r\n", 400, "not an HTTP request"),
        ("\x16\x03\x01\x02\x00\x01", 400, "not an HTTP request"),
        (f"GET /v1/models HTTP/1.1\r\n{HOST}{HOST}\r\n", 400, "several Host headers"),
        (f"GET /v1/{'x' * 70_000} HTTP/1.1\r\n{HOST}\r\n", 431, "longer than 65536 bytes"),
        (f"GET /v1/models HTTP/1.1\r\n{HOST}X: {'x' * 70_000}\r\n\r\n", 431, "longer than 65536"),
        (f"POST / HTTP/1.1\r\n{HOST}Content-Length: -1\r\n\r\n", 400, "headers of the request are"),
        (
            f"POST / HTTP/1.1\r\n{HOST}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "headers of the request are malformed",
        ),
    ],
)
def test_an_unreadable_request_gets_an_error_in_openais_shape(
    http: RunningGateway, data: str, status: int, problem: str
) -> None:
    head, body = exchange(http, data)
    assert head.startswith(f"http/1.1 {status} ")
    error = json.loads(body)["error"]
    assert problem in error["message"] and error["type"] == "invalid_request_error"


def test_an_unreadable_request_to_anthropics_path_gets_its_shape(http: RunningGateway) -> None:
    _, body = exchange(http, f"GET /v1/messages HTTP/1.1\r\n{HOST}{HOST}\r\n")
    assert json.loads(body)["type"] == "error"


def test_pipelined_requests_are_answered_in_their_order(http: RunningGateway) -> None:
    texts = ["one", "two", "three"]
    bodies = [{**HELLO, "messages": [{"role": "user", "content": text}]} for text in texts]
    data = "".join(post(body) for body in bodies[:-1]) + post(
        bodies[-1], more="Connection: close\r\n"
    )
    with connected(http) as sock:
        sock.sendall(data.encode())
        found = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
    places = [found.index(f'"content":"{text}"') for text in texts]
    assert places == sorted(places) and found.count("HTTP/1.1 200 OK") == 3


def test_garbage_after_a_request_does_not_end_up_in_its_response(http: RunningGateway) -> None:
    with connected(http) as sock:
        sock.sendall((post({**HELLO, "stream": True}) + "nonsense\r\n\r\n").encode())
        found = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b"not an HTTP request" not in found


CHUNKED = f"POST /v1/chat/completions HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n"
CUT = post(HELLO)[:-10]
BROKEN_BODIES = {
    "a chunk without a size": (f'{CHUNKED}5\r\n{{"mod\r\nzz\r\n', False, "malformed"),
    "a chunk longer than its size": (f'{CHUNKED}5\r\n{{"model"\r\n', False, "malformed"),
    "a body cut before its length": (CUT, True, "incomplete"),
    "a body cut after its headers": (CUT[: CUT.index("{")], True, "incomplete"),
    "chunks without an end": (f'{CHUNKED}5\r\n{{"mod\r\n', True, "incomplete"),
    "headers without an end": (CUT[: CUT.index("Content-Length")], True, "incomplete"),
}


@pytest.mark.parametrize("name", BROKEN_BODIES)
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_cut_or_malformed_request_gets_an_error_as_text(
    http: RunningGateway, name: str, pipelined: bool
) -> None:
    """Also after a request whose response is still under way, which comes first."""
    data, ends, problem = BROKEN_BODIES[name]
    with connected(http) as sock:
        if pipelined and name != "headers without an end":
            data = post(HELLO) + data
        sock.sendall(data.encode())
        if ends:
            sock.shutdown(socket.SHUT_WR)
        found = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
    first, *rest = found.split("HTTP/1.1 ")[1:]
    if rest:
        assert '"content":"hello"' in first
        [first] = rest
    assert first.startswith("400 ") and "connection: close" in first
    error = json.loads(first.partition("\r\n\r\n")[2])["error"]
    assert problem in error["message"] and error["type"] == "invalid_request_error"


def test_a_body_longer_than_its_length_is_answered_by_its_beginning(http: RunningGateway) -> None:
    """The rest is not a request; it must not end the connection before the response."""
    text = json.dumps(HELLO)
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{HOST}{JSON}Content-Length: {len(text) - 5}"
    head, body = exchange(http, f"{head}\r\n\r\n{text}")
    assert head.startswith("http/1.1 400 ") and "not json" in body.lower()
    whole = f"{post(HELLO)}}}}}\r\n\r\n"
    head, body = exchange(http, whole)
    assert head.startswith("http/1.1 200 ") and '"content":"hello"' in body


LARGE = 65 << 20


@pytest.mark.parametrize(
    ("path", "size_max"),
    [
        ("/v1/chat/completions", 64 << 20),
        ("/v1/messages", 64 << 20),
        ("/v1/responses", 64 << 20),
        ("/api/chat", 64 << 20),
        ("/v1/inferd/sessions", 1 << 20),
        ("/v1/completions", 8 << 20),
        ("/v1/embeddings", 8 << 20),
        ("/api/embed", 8 << 20),
    ],
)
def test_a_body_that_is_too_long_gets_the_limit_of_its_path(
    web: httpx.Client, path: str, size_max: int
) -> None:
    long = web.post(path, content=b" " * (size_max + 1))
    assert long.status_code == 413
    error = long.json()["error"]
    text = error if isinstance(error, str) else error["message"]
    assert f"has {size_max + 1} bytes; {path} allows {size_max}" in text
    assert "--body-bytes-max" not in text, "a larger one would change nothing"
    assert web.post(path, content=b" " * size_max).status_code == 400  # not JSON


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 900_000, "more": [0.5] * 20_000}]},
        ),
        ("/v1/completions", {"prompt": ["x" * (7 << 20)]}),
        ("/v1/completions", {"prompt": "x" * (2 << 20)}),
        ("/v1/embeddings", {"input": ["a", "x" * (2 << 20)]}),
        ("/v1/rerank", {"query": "q", "documents": ["x" * (2 << 20)]}),
    ],
)
def test_a_text_that_is_too_long_is_refused_without_words_of_the_protocol(
    web: httpx.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    if "embed" not in path:
        body = {**body, "stream": stream}
    found = web.post(path, json={"model": "echo", **body})
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (413, "too_large")
    assert "1048576 are allowed" in error["message"] and "frame" not in error["message"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"POST /v1/chat/completions HTTP/1.1\r\n{HOST}{JSON}", 413),
        (f"POST /v1/messages HTTP/1.1\r\n{HOST}{JSON}", 413),
        (f"POST /v1/chat/completions HTTP/1.0\r\n{HOST}{JSON}", 413),
        (f"POST /v1/nothing HTTP/1.1\r\n{HOST}{JSON}Connection: close\r\n", 404),
        (f"POST /v1/models HTTP/1.1\r\n{HOST}{JSON}", 405),
        (f"POST /v1/chat/completions HTTP/1.1\r\nHost: elsewhere\r\n{JSON}", 403),
    ],
)
def test_a_client_that_sends_all_first_reads_the_early_response(
    http: RunningGateway, head: str, status: int
) -> None:
    """The connection would be reset if it were closed with unread data."""
    data = f"{head}Content-Length: {LARGE}\r\n\r\n".encode() + b" " * LARGE
    with connected(http) as sock:
        sock.sendall(data)
        found = b"".join(iter(lambda: sock.recv(65536), b""))
    assert found.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in found
    assert b"error" in found.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_gets_the_413(http: RunningGateway, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "x" * (7 << 20)}]
    with (
        openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as api,
        pytest.raises(openai.APIStatusError) as caught,
    ):
        api.chat.completions.create(model="echo", messages=messages, stream=stream)
    assert caught.value.status_code == 413
    assert "1048576 are allowed" in caught.value.message


def test_chunks_that_become_too_long_get_their_413(http: RunningGateway) -> None:
    chunk = b"%x\r\n%b\r\n" % (1 << 20, b" " * (1 << 20))
    with connected(http) as sock:
        sock.sendall(CHUNKED.encode() + chunk * 65 + b"0\r\n\r\n")
        found = b"".join(iter(lambda: sock.recv(65536), b""))
    assert found.startswith(b"HTTP/1.1 413 ") and b"allows 67108864" in found


def test_a_client_that_does_not_close_after_a_refusal_is_disconnected(
    daemon: RunningDaemon,
) -> None:
    """It reads the end of the response at once; its own side is awaited for a time."""
    with gateway(daemon, "--receive-timeout", "0.5") as running, connected(running) as sock:
        sock.sendall(f"{CHUNKED}zz\r\n".encode())
        found = b"".join(iter(lambda: sock.recv(65536), b""))
        assert found.startswith(b"HTTP/1.1 400 ")
        port, process = sock.getsockname()[1], psutil.Process(running.process.pid)
        wait_until(lambda: port not in [each.raddr.port for each in _of_clients(process)])


def test_a_client_that_does_not_close_does_not_delay_the_end_of_the_gateway(
    daemon: RunningDaemon,
) -> None:
    with gateway(daemon) as running, connected(running) as sock:
        sock.sendall(f"{CHUNKED}zz\r\n".encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 400 ")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(CALL_S_MAX) == 0
        assert running.process.stderr is not None
        assert b"timeout" not in running.process.stderr.read()


def test_a_client_that_was_refused_late_is_disconnected_when_it_ends(
    daemon: RunningDaemon,
) -> None:
    """Not only after the time for the rest of its request, which is dropped."""
    with gateway(daemon, "--receive-timeout", "600") as running:
        process = psutil.Process(running.process.pid)
        httpx.post(f"{running.url}/v1/chat/completions", json=HELLO, timeout=CALL_S_MAX)
        wait_until(lambda: not _of_clients(process))
        files = process.num_fds()
        with connected(running) as sock:
            sock.sendall(f"{post(HELLO)}{CHUNKED}zz\r\n".encode())
            found = b"".join(iter(lambda: sock.recv(65536), b""))
            assert found.count(b"HTTP/1.1 ") == 2
            assert process.num_fds() == files + 1
            sock.shutdown(socket.SHUT_WR)
            wait_until(lambda: process.num_fds() == files)


def test_a_client_that_does_not_read_the_last_response_is_disconnected(
    daemon: RunningDaemon,
) -> None:
    """The buffers of the kernel and the gateway hold different parts of the responses."""
    request = f"GET /openapi.json HTTP/1.1\r\n{HOST}"
    with gateway(daemon, "--receive-timeout", "1") as running, ExitStack() as stack:
        process = psutil.Process(running.process.pid)
        for count in range(4, 20):  # of 55 kB each; the kernel holds half a megabyte
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((running.host, running.port))
            last = f"{request}Connection: close\r\n\r\n"
            sock.sendall((f"{request}\r\n" * (count - 1) + last).encode())
            assert sock.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: not _open_to(process, running.port))


def _open_to(process: psutil.Process, port: int) -> list[Any]:
    return [e for e in _of_clients(process) if e.laddr.port == port and e.status != "FIN_WAIT1"]


def _of_clients(process: psutil.Process) -> list[Any]:
    return [each for each in process.net_connections() if each.raddr]


def test_a_client_that_sends_after_its_response_without_end_is_disconnected(
    http: RunningGateway,
) -> None:
    with connected(http) as sock, pytest.raises((BrokenPipeError, ConnectionResetError)):
        sock.sendall(CHUNKED.encode())
        for _ in range(200):
            sock.sendall(b"%x\r\n%b\r\n" % (1 << 20, b" " * (1 << 20)))


def test_a_request_for_another_protocol_is_answered_in_http(
    http: RunningGateway, web: httpx.Client
) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    assert web.get("/v1/models", headers=upgrade).status_code == 200


@pytest.mark.parametrize(
    ("path", "name"),
    [("ech%6f", "echo"), ("a%2Fb", "a/b"), ("%00", "\\x00"), ("%ff", "\N{REPLACEMENT CHARACTER}")],
)
def test_a_models_name_may_be_percent_encoded(web: httpx.Client, path: str, name: str) -> None:
    found = web.get(f"/v1/models/{path}")
    if name == "echo":
        assert found.json()["id"] == "echo"
    else:
        assert found.status_code == 404 and f"'{name}'" in found.json()["error"]["message"]


def test_the_oldest_silent_connection_is_closed_at_the_maximum(daemon: RunningDaemon) -> None:
    """There are 424 more connections than requests, for those that wait for their next request."""
    with gateway(daemon, "--requests-max", "1") as running, ExitStack() as stack:
        kept = [stack.enter_context(connected(running)) for _ in range(425)]
        found = httpx.get(f"{running.url}/v1/models", timeout=CALL_S_MAX)
        assert found.status_code == 200
        assert kept[0].recv(1) == b""
        kept[1].sendall(post(HELLO, more="Connection: close\r\n").encode())
        assert kept[1].recv(65536).startswith(b"HTTP/1.1 200 ")


def test_requests_of_six_hundred_connections_at_once_end(http: RunningGateway) -> None:
    """Each gets an answer, or the refusal of the daemon's queue with the time to retry."""
    data = post(HELLO, more="Connection: close\r\n").encode()
    socks = [socket.create_connection((http.host, http.port), CALL_S_MAX) for _ in range(600)]
    for sock in socks:
        sock.sendall(data)
    answers = []
    for sock in socks:
        with sock:
            answers.append(b"".join(iter(lambda: sock.recv(65536), b"")))  # noqa: B023
    assert {answer.split(b" ", 2)[1] for answer in answers} <= {b"200", b"503"}
    answered = [answer for answer in answers if b"200 OK" in answer]
    assert len(answered) >= 228 and all(b'"content":"hello"' in answer for answer in answered)
    refused = [answer for answer in answers if b"200 OK" not in answer]
    assert all(b"retry-after: " in a and b'"code":"overloaded"' in a for a in refused)


BAD_VALUES = {
    "a number beyond all floats": ('"temperature":1e999', None, "out of range"),
    "NaN": ('"temperature":NaN', None, "not JSON"),
    "a number of forty digits": (f'"top_k":{"9" * 40}', "top_k", "out of range"),
    "a lone surrogate": ('"user":"\\ud800"', None, "not JSON"),
    "a NUL byte": ('"user":"\0"', None, "not JSON"),
    "a deep list": (f'"messages":{"[" * 50_000}{"]" * 50_000}', None, "not JSON"),
    "a long value": (f'"service_tier":"{"x" * 1_000_000}"', "service_tier", "Invalid enum value"),
    "an adapter's long name": (f'"lora":"{"x" * 1_000_000}"', None, "no adapter 'xxx"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_bad_value_is_refused_in_few_words(web: httpx.Client, name: str) -> None:
    text, param, problem = BAD_VALUES[name]
    body = json.dumps(HELLO)[:-1] + f",{text}}}"
    found = web.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    error = found.json()["error"]
    assert found.status_code == 400 and problem in error["message"]
    assert len(found.content) < 1000
    assert error["param"] == param


def test_the_last_of_duplicate_keys_counts(web: httpx.Client) -> None:
    body = '{"model":"nobody",' + json.dumps(HELLO)[1:]
    found = web.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert found.json()["model"] == "echo"


def test_a_long_name_that_no_table_has_is_shortened(web: httpx.Client) -> None:
    found = web.post("/v1/inferd/sessions", json={"model": "echo", "x" * 1_000_000: 1})
    assert found.status_code == 400 and len(found.content) < 1000
