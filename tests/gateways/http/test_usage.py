"""Usage of keys over HTTP: each sees its own, and its limits hold over a restart of everything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from inferd.gateways.http.callers import new_key
from inferd.testing import RunningDaemon
from tests.gateways.http.driver import gateway
from tests.gateways.http.own_paths import Caller

ENTRIES = {
    "phone": 'user = "@ada"\n',
    "tablet": 'user = "@ada"\ntokens-per-day = 1\n',
    "olga": "operator = true\n",
}


@contextmanager
def callers(
    daemon: RunningDaemon, keys: Mapping[str, tuple[str, str]], folder: Path
) -> Iterator[dict[str, Caller]]:
    file = folder / "keys.toml"
    file.write_text("\n".join(entry + ENTRIES[name] for name, (_, entry) in keys.items()))
    with gateway(daemon, "--keys", str(file)) as running:
        yield {name: Caller(running, key) for name, (key, _) in keys.items()}


def usage(caller: Caller, query: str = "?by=model,key") -> dict[str, Any]:
    response = caller.get(f"/usage{query}")
    assert response.status == HTTPStatus.OK, response
    return dict(response.json)


def complete(caller: Caller) -> tuple[int, str | None]:
    """Return the status of a chat, and the header that says when to retry."""
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
    with caller.opened("POST", "/v1/chat/completions", body) as response:
        return response.status, response.getheader("Retry-After")


def test_a_key_sees_its_own_usage_and_an_operator_all(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    keys = {name: new_key(name) for name in ENTRIES}
    with callers(daemon, keys, tmp_path) as found:
        phone, tablet, olga = (found[name] for name in ("phone", "tablet", "olga"))
        phone.chat("echo", "hello")
        tablet.chat("echo", "hello")
        [row] = usage(phone)["data"]
        assert (row["object"], row["key"], row["model"], row["requests"]) == (
            "usage",
            "phone",
            "echo",
            1,
        )
        everybody = usage(olga, "?by=key&all=true")["data"]
        assert {"phone", "tablet"} <= {each["key"] for each in everybody}
        assert phone.get("/usage?all=true").status == HTTPStatus.FORBIDDEN
        for query in ("?since=x", "?by=colour", "?by=key,key"):
            assert phone.get(f"/usage{query}").status == HTTPStatus.BAD_REQUEST, query
        [limit] = usage(tablet)["limits"]
        assert limit["bound"] == "tokens-per-day" and limit["used"] > 1
        assert usage(phone)["limits"] == []
        assert tablet.get("/caller").json["limits"]["tokens_per_day"] == 1
    with callers(daemon, keys, tmp_path) as found:
        status, retry_after = complete(found["tablet"])
        assert status == HTTPStatus.TOO_MANY_REQUESTS
        assert retry_after is not None and 0 < int(retry_after) <= 86_401
        assert complete(found["phone"]) == (HTTPStatus.OK, None)
