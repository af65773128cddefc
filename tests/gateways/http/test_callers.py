"""Keys, hosts, origins, content types, sizes, addresses, TLS."""

from __future__ import annotations

import json
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

import openai
import pytest

from inferd import Busy, Client, QuotaExceeded
from inferd.gateways.http.callers import Caller, Quotas
from inferd.gateways.http.heads import Origins
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway, new_certificate, tls_options
from tests.waiting import wait_until

CONFIG = echo_model("echo") + echo_model("other")
BODY = json.dumps({"model": "echo", "prompt": "hi"})
JSON = {"Content-Type": "application/json"}
PATH = "/v1/completions"


def ask(
    running: RunningGateway,
    headers: dict[str, str] = JSON,
    *,
    method: str = "POST",
    path: str = PATH,
    body: str | bytes | None = BODY,
) -> tuple[int, Any, Any]:
    """Return the status, the JSON and the headers of a response."""
    connection = HTTPConnection(running.host, running.port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data else None, response.headers
    finally:
        connection.close()


# Without keys.


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "[::1]"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 200),
        ({"Content-Type": "text/plain", "Host": "a", "Origin": "http://a"}, 403),
        ({"Content-Type": "text/plain", "Host": "[::1]", "Origin": "http://[::1]"}, 415),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "text/plain", "Sec-Fetch-Site": "same-origin"}, 415),
        ({"Content-Type": "text/plain", "Referer": "https://evil.example/"}, 415),
        ({"Content-Type": "text/plain", "Cookie": "a=b"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Authorization": "Bearer anything"}, 200),
    ],
)
def test_pages_of_other_sites_cannot_call(
    http: RunningGateway, headers: dict[str, str], status: int
) -> None:
    found, body, got = ask(http, JSON | headers)
    assert found == status, body
    assert "access-control-allow-origin" not in got
    if status != 200:
        assert body["error"]["message"] and set(body["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }


def test_only_listed_origins_get_cors(daemon: RunningDaemon) -> None:
    page = "https://chat.example"
    with gateway(daemon, "--allow-origin", page, "--allow-host", "ai.example") as running:
        status, _, headers = ask(running, JSON | {"Origin": page, "Host": "ai.example"})
        assert (status, headers["access-control-allow-origin"]) == (200, page)
        preflight = {"Origin": page, "Access-Control-Request-Method": "POST"}
        preflight["Access-Control-Request-Headers"] = "content-type,x-stainless-os"
        status, _, headers = ask(running, preflight, method="OPTIONS", body=None)
        assert (status, headers["access-control-allow-methods"]) == (204, "POST")
        assert headers["access-control-allow-headers"] == "content-type,x-stainless-os"
        assert ask(running, JSON | {"Origin": "https://evil.example"})[0] == 403
        status, _, headers = ask(
            running, {"Origin": "https://evil.example"}, method="OPTIONS", body=None
        )
        assert status == 403 and "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", PATH, 405), ("DELETE", "/v1/models", 405)],
)
def test_unknown_paths_and_methods_have_openais_shape(
    http: RunningGateway, method: str, path: str, status: int
) -> None:
    found, body, _ = ask(http, method=method, path=path, body=None)
    assert found == status and body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model": "\\ud800"}'])
def test_a_body_that_is_not_a_json_object_is_refused(http: RunningGateway, body: bytes) -> None:
    assert ask(http, body=body)[0] == 400


@contextmanager
def connected(running: RunningGateway) -> Iterator[HTTPConnection]:
    """Yield a connection that has sent the head of a request, without its length."""
    connection = HTTPConnection(running.host, running.port, timeout=60)
    try:
        connection.putrequest("POST", PATH)
        connection.putheader("Content-Type", "application/json")
        yield connection
    finally:
        connection.close()


def status_of(connection: HTTPConnection) -> int:
    with connection.getresponse() as response:
        response.read()
    return response.status


def test_a_long_body_is_refused_before_it_is_read(daemon: RunningDaemon) -> None:
    with gateway(daemon, "--body-bytes-max", "1000") as running:
        long = json.dumps({"model": "echo", "prompt": "x" * 1001})
        status, error, _ = ask(running, body=long)
        assert status == 413 and "--body-bytes-max" in error["error"]["message"]
        with connected(running) as connection:
            connection.putheader("Content-Length", str(1 << 40))
            connection.endheaders()
            assert status_of(connection) == 413
        with connected(running) as connection:
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders(iter([b"x" * 600] * 2), encode_chunked=True)
            assert status_of(connection) == 413


def test_a_request_that_does_not_arrive_in_time_is_ended(daemon: RunningDaemon) -> None:
    with gateway(daemon, "--receive-timeout", "0.2") as running:
        with connected(running) as connection:
            connection.putheader("Content-Length", "100")
            connection.endheaders(b"{")
            assert status_of(connection) == 408
        with socket.create_connection((running.host, running.port)) as sock:
            sock.sendall(b"POST /v1/comp")
            assert sock.recv(1000) == b""


def test_endless_headers_end_the_connection(http: RunningGateway) -> None:
    with connected(http) as connection:
        for number in range(100):
            connection.putheader(f"X-{number}", "y" * 1000)
        connection.endheaders()
        assert status_of(connection) == 431


def test_without_keys_the_gateway_listens_only_on_this_machine() -> None:
    result = inferd("gateway", "--listen", "0.0.0.0:0")
    assert result.exit_code == 1 and "--keys" in result.stderr
    for address in ("8080", "unix:", "127.0.0.1:99999", "host:"):
        assert "HOST:PORT" in inferd("gateway", "--listen", address).stderr


def test_a_unix_socket_is_served(daemon: RunningDaemon, tmp_path: Path) -> None:
    import httpx2

    path = tmp_path / "http.sock"
    with gateway(daemon, listen=f"unix:{path}") as running:
        assert running.address == f"unix:{path}" and path.stat().st_mode & 0o777 == 0o600
        transport = httpx2.HTTPTransport(uds=str(path))
        with openai.OpenAI(
            base_url="http://inferd/v1",
            api_key="none",
            http_client=openai.DefaultHttpxClient(transport=transport),
        ) as api:
            assert api.completions.create(model="echo", prompt="hi").choices[0].text == "hi"


# Keys.


class WithKeys(RunningGateway):
    """A gateway with the keys of several users."""

    keys: dict[str, str]
    file: Path


def new_key(name: str) -> tuple[str, str]:
    """Return a key and its entry, as the command shows them."""
    result = inferd("gateway", "--new-key", name)
    assert result.exit_code == 0
    return result.stderr.split()[-1], result.stdout


@pytest.fixture(scope="module")
def keyed(daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WithKeys]:
    entries = {name: new_key(name) for name in ("ada", "bob", "eve", "kim", "tom")}
    more = {
        "ada": 'priority-max = "High"\n',
        "bob": 'models = ["echo"]\nrequests-max = 1\n',
        "eve": 'user = ""\nlabel = "eve"\ntokens-per-minute = 10\n',
        "kim": 'priority-max = "low"\n',
        "tom": "tokens-per-minute = 10.0\n",
    }
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text("\n".join(entry + more[name] for name, (_, entry) in entries.items()))
    with gateway(daemon, "--keys", str(file), listen="0.0.0.0:0") as running:
        found = WithKeys(running.process, running.address.replace("0.0.0.0", "127.0.0.1"))
        found.keys, found.file = {name: key for name, (key, _) in entries.items()}, file
        yield found


def with_key(running: WithKeys, name: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{running.url}/v1", api_key=running.keys.get(name, name), max_retries=0
    )


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer x"}, {"Authorization": "Basic eA=="}, {"X-Api-Key": "y"}],
)
def test_without_a_known_key_nothing_is_answered(keyed: WithKeys, headers: dict[str, str]) -> None:
    status, body, got = ask(keyed, JSON | headers)
    assert status == 401 and got["www-authenticate"] == "Bearer"
    assert body["error"]["code"] == "invalid_api_key"


def test_a_key_acts_for_a_user_of_its_own(keyed: WithKeys, client: Client) -> None:
    with with_key(keyed, "ada") as ada, with_key(keyed, "eve") as eve:
        for api in (ada, eve):
            api.chat.completions.create(
                model="echo",
                messages=[{"role": "user", "content": "hi"}],
                extra_body={"session_id": "same"},
            )
    sessions = client.sessions(dormant=True, all_users=True)
    found = {(each["user"], each["label"]) for each in sessions if each["session_id"] == "same"}
    assert found == {("@ada", ""), ("", "eve")}


def test_the_key_is_also_read_from_x_api_key(keyed: WithKeys) -> None:
    assert ask(keyed, JSON | {"X-Api-Key": keyed.keys["ada"]})[0] == 200


def test_a_key_has_its_highest_class(keyed: WithKeys) -> None:
    with with_key(keyed, "ada") as ada, with_key(keyed, "bob") as bob:
        high: Any = {"priority": "high"}
        ada.completions.create(model="echo", prompt="x", extra_body=high)
        with pytest.raises(openai.PermissionDeniedError) as caught:
            bob.completions.create(model="echo", prompt="x", extra_body=high)
        assert caught.value.param == "priority"
        messages: Any = [{"role": "user", "content": "x"}]
        tiers = [
            api.chat.completions.create(model="echo", messages=messages, service_tier="priority")
            for api in (ada, bob)
        ]
        assert [done.service_tier for done in tiers] == ["priority", "default"]


TALK = {"model": "echo", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "echo", "prompt": "x"}),
        ("/v1/chat/completions", TALK),
        ("/v1/responses", {"model": "echo", "input": "x"}),
        ("/v1/embeddings", {"model": "echo", "input": "x"}),
        ("/v1/messages", {**TALK, "max_tokens": 9}),
        ("/api/chat", {**TALK, "stream": False}),
        ("/api/generate", {"model": "echo", "prompt": "x", "stream": False}),
        ("/api/embed", {"model": "echo", "input": "x"}),
        ("/v1/inferd/sessions", {"model": "echo"}),
    ],
)
def test_a_request_without_a_class_has_at_most_that_of_its_key(
    keyed: WithKeys, path: str, body: dict[str, Any]
) -> None:
    kim = JSON | {"Authorization": f"Bearer {keyed.keys['kim']}"}
    assert ask(keyed, kim, path=path, body=json.dumps(body))[0] == 200
    if path != "/api/embed":  # Ollama's API has no class there
        normal = json.dumps({**body, "priority": "normal"})
        assert ask(keyed, kim, path=path, body=normal)[0] == 403


def test_a_key_has_its_models(keyed: WithKeys) -> None:
    with with_key(keyed, "bob") as bob:
        assert [model.id for model in bob.models.list()] == ["echo"]
        for call in (
            lambda: bob.models.retrieve("other"),
            lambda: bob.completions.create(model="other", prompt="x"),
            lambda: bob.embeddings.create(model="other", input="x"),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                call()
            assert caught.value.code == "model_not_found"


def test_used_tokens_are_429(keyed: WithKeys) -> None:
    with with_key(keyed, "eve") as eve:
        with pytest.raises(openai.RateLimitError) as caught:
            for _ in range(3):
                eve.completions.create(model="echo", prompt="hello hello")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "rate_limit_exceeded"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
def test_texts_for_embeddings_use_tokens_too(keyed: WithKeys, path: str) -> None:
    tom = JSON | {"Authorization": f"Bearer {keyed.keys['tom']}"}
    body = json.dumps({"model": "echo", "input": "hello hello"})
    found = [ask(keyed, tom, path=path, body=body)[0] for _ in range(3)]
    assert found[-1] == 429 and set(found) <= {200, 429}


def test_sighup_reads_the_keys_again(keyed: WithKeys) -> None:
    key, entry = new_key("zoe")
    with keyed.file.open("a") as file:
        file.write("\n" + entry)
    keyed.process.send_signal(signal.SIGHUP)
    wait_until(lambda: ask(keyed, JSON | {"X-Api-Key": key})[0] == 200)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "keys"),
        ("[keys.a]\n", "sha256"),
        ('[keys.a]\nsha256 = "00"\n', "sha256"),
        (f'[keys.a]\nsha256 = "{"0" * 64}"\ncolour = 1\n', "colour"),
        (f'[keys.a]\nsha256 = "{"0" * 64}"\n[keys.b]\nsha256 = "{"0" * 64}"\n', "equal"),
        (f'[keys."a b"]\nsha256 = "{"0" * 64}"\n', "a b"),
        ("[keys", "Expected"),
        (f'[keys.a]\nsha256 = "{"0" * 64}"\nrequests-max = 1.5\n', "requests-max"),
    ],
)
def test_mistakes_in_the_keys_are_reported(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    result = inferd("gateway", "--keys", str(file))
    assert result.exit_code == 1 and problem in result.stderr


def test_https_is_served(daemon: RunningDaemon, tmp_path: Path) -> None:
    certificate, key = made = new_certificate(tmp_path)
    context = ssl.create_default_context(cafile=certificate)
    with gateway(daemon, *tls_options(*made)) as running:
        connection = HTTPSConnection(running.host, running.port, context=context)
        connection.request("POST", PATH, BODY, JSON)
        assert status_of(connection) == 200
        connection.request("POST", PATH, b" " * (9 << 20), JSON)
        assert status_of(connection) == 413
        connection.close()
    assert "TLS" in inferd("gateway", "--tls-certificate", str(key)).stderr
    assert "--tls-key" in inferd("gateway", "--tls-key", str(key)).stderr


# The decisions alone.


def test_hosts_and_origins() -> None:
    local = Origins((), (), any_host=False)
    assert local.allows_host("127.0.0.2:1") and local.allows_host("LOCALHOST.")
    assert not local.allows_host("") and not local.allows_host("10.0.0.1")
    assert Origins((), (), any_host=True).allows_host("anything")
    assert not Origins(("a",), (), any_host=True).allows_host("b")
    assert Origins((), ("*",), any_host=False).is_listed("https://a")


def test_a_key_leaves_an_eighth_of_the_requests() -> None:
    quotas, ada = Quotas(16), Caller(name="ada")
    for _ in range(14):
        quotas.begin_request(ada, 0.0)
    with pytest.raises(QuotaExceeded):
        quotas.begin_request(ada, 0.0)
    quotas.begin_request(Caller(name="bob"), 0.0)
    alone = Quotas(16)
    for _ in range(16):
        alone.begin_request(Caller(), 0.0)  # the only caller of a gateway without keys


def test_quotas_are_refilled_evenly() -> None:
    quotas, caller = Quotas(2), Caller(name="a", requests_max=1, tokens_per_minute=60)
    quotas.begin_request(caller, 0.0)
    with pytest.raises(QuotaExceeded):
        quotas.begin_request(caller, 0.0)
    quotas.begin_request(Caller(name="b"), 0.0)
    with pytest.raises(Busy):
        quotas.begin_request(Caller(name="c"), 0.0)
    quotas.end_request(caller)
    quotas.charge_tokens(caller, 100, 0.0)
    with pytest.raises(QuotaExceeded) as caught:
        quotas.begin_request(caller, 10.0)
    assert caught.value.retry_after_s == pytest.approx(31)
    quotas.begin_request(caller, 41.0)
