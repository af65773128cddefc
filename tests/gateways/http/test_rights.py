"""The rights to the daemon's own paths: each path, by each kind of caller."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, NamedTuple

import pytest

from inferd import Client
from inferd.gateways.http.callers import new_key
from inferd.gateways.http.inferd_api import INFERD
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.gateways.http.own_paths import PATH, Caller

CONFIG = "".join(echo_model(name) for name in ("echo", "other", "third"))
OK, UNKNOWN, DENIED = HTTPStatus.OK, HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN
ENTRIES = {
    "ada": 'priority-max = "high"\n',
    "bob": 'models = ["echo"]\n',
    "olga": "operator = true\n",
    "eva": 'user = ""\n',
    "eve": 'user = ""\nlabel = "eve"\n',
}


class Step(NamedTuple):
    """A request about ada's session, and its statuses for those who may see it, for others, and
    for operators.
    """

    method: str
    path: str
    fields: dict[str, Any] | None
    own: int = OK
    others: int = OK
    operator: int | None = None


SESSION = f"{PATH}/sessions/{{session:path}}"
STEPS = {
    ("GET", f"{PATH}/caller"): Step("GET", "/caller", None),
    ("GET", f"{PATH}/sessions"): Step("GET", "/sessions", None),
    ("POST", f"{PATH}/sessions"): Step("POST", "/sessions", {"model": "echo"}),
    ("GET", SESSION): Step("GET", "/sessions/diary", None, others=UNKNOWN),
    ("GET", f"{SESSION}/media/{{sha256}}"): Step(
        "GET", f"/sessions/diary/media/{'0' * 64}", None, own=UNKNOWN, others=UNKNOWN
    ),
    ("POST", f"{SESSION}/fork"): Step("POST", "/sessions/diary/fork", {}, others=UNKNOWN),
    ("POST", f"{SESSION}/rewind"): Step(
        "POST", "/sessions/diary/rewind", {"turns": 1}, others=UNKNOWN
    ),
    ("POST", f"{SESSION}/cancel"): Step("POST", "/sessions/diary/cancel", {}, others=UNKNOWN),
    ("GET", f"{SESSION}/events"): Step("GET", "/sessions/diary/events", None, others=UNKNOWN),
    ("PATCH", SESSION): Step("PATCH", "/sessions/diary", {"title": "x"}, others=UNKNOWN),
    ("POST", f"{SESSION}/restore"): Step(
        "POST", "/sessions/diary/restore", {}, own=UNKNOWN, others=UNKNOWN
    ),
    ("POST", f"{SESSION}/end-reasoning"): Step(
        "POST", "/sessions/diary/end-reasoning", {}, others=UNKNOWN
    ),
    ("GET", f"{PATH}/deletions"): Step("GET", "/deletions", None),
    ("DELETE", f"{PATH}/deletions"): Step("DELETE", "/deletions", None),
    ("DELETE", SESSION): Step("DELETE", "/sessions/diary", None, others=UNKNOWN),
    ("GET", f"{PATH}/queue"): Step("GET", "/queue", None),
    ("GET", f"{PATH}/models"): Step("GET", "/models", None),
    ("GET", f"{PATH}/models/{{model:path}}"): Step("GET", "/models/echo", None),
    ("GET", f"{PATH}/statistics"): Step("GET", "/statistics", None),
    ("GET", f"{PATH}/usage"): Step("GET", "/usage?by=day,model&since=24h", None),
    ("GET", f"{PATH}/events"): Step("GET", "/events", None),
    ("POST", f"{PATH}/models/load"): Step(
        "POST", "/models/load", {"model": "third"}, own=DENIED, others=DENIED, operator=OK
    ),
    ("POST", f"{PATH}/models/swap"): Step(
        "POST",
        "/models/swap",
        {"model": "third", "to": "third"},
        own=DENIED,
        others=DENIED,
        operator=OK,
    ),
    ("POST", f"{PATH}/models/unload"): Step(
        "POST", "/models/unload", {"model": "third"}, own=DENIED, others=DENIED, operator=OK
    ),
}
"""In an order in which the session is there for each step."""


@pytest.fixture(scope="module")
def keyed(
    daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Caller]]:
    """The callers of a gateway with keys, by their names; that of nobody has no known key."""
    keys = {name: new_key(name) for name in ENTRIES}
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text("\n".join(entry + ENTRIES[name] for name, (_, entry) in keys.items()))
    with gateway(daemon, "--keys", str(file)) as running:
        callers = {name: Caller(running, key) for name, (key, _) in keys.items()}
        yield callers | {"nobody": Caller(running), "stranger": Caller(running, "sk-inferd-x")}


def test_each_path_has_a_test_of_its_rights() -> None:
    assert set(STEPS) == {(endpoint.method, endpoint.path) for endpoint in INFERD.endpoints}
    assert not [endpoint for endpoint in INFERD.endpoints if endpoint.public]


def has_diary(caller: Caller) -> bool:
    """Return whether the response to a caller is a stream, which is not JSON."""
    return caller.get("/sessions/diary").status == OK


def send(caller: Caller, step: Step) -> int:
    if step.path == "/events" or (step.path.endswith("/events") and has_diary(caller)):
        with caller.opened(step.method, f"{PATH}{step.path}") as stream:
            return stream.status
    response = caller.send(step.method, step.path, step.fields)
    if response.status >= 400:
        assert set(response.json["error"]) == {"message", "type", "param", "code"}
        assert response.json["error"]["code"], response
    return response.status


@pytest.mark.parametrize("step", STEPS.values(), ids=map(" ".join, STEPS))
def test_a_path_serves_its_caller_and_hides_others_sessions(
    keyed: dict[str, Caller], http: RunningGateway, step: Step
) -> None:
    local = Caller(http)
    for caller in (keyed["ada"], local):
        if caller.get("/sessions/diary").status == UNKNOWN:
            caller.post("/sessions", model="echo", id="diary")
        caller.chat("echo", "hi", "diary")
    for name in ("nobody", "stranger"):
        assert send(keyed[name], step) == HTTPStatus.UNAUTHORIZED
    for name in ("bob", "olga", "eve"):
        expected = step.operator if name == "olga" and step.operator else step.others
        assert send(keyed[name], step) == expected, name
    for caller in (keyed["ada"], local):
        assert send(caller, step) == step.own


def test_a_model_that_a_caller_may_not_use_is_described_as_an_absent_one_is(
    keyed: dict[str, Caller],
) -> None:
    hidden, absent = (keyed["bob"].get(f"/models/{name}") for name in ("other", "absent"))
    assert (hidden.status, absent.status) == (UNKNOWN, UNKNOWN)
    assert (
        hidden.json["error"]["message"].replace("other", "absent")
        == (absent.json["error"]["message"])
    )


def test_callers_of_the_gateways_user_see_only_their_own_label(
    keyed: dict[str, Caller], client: Client
) -> None:
    """The daemon lists all labels of a user to its programs without a label."""
    keyed["eve"].post("/sessions", model="echo", id="hers")
    with Client(client.path) as own, own.session("echo", session_id="programs") as session:
        session.chat("x")
        assert "programs" in listed(keyed["eva"])
    assert "hers" in listed(keyed["eve"]) and "hers" not in listed(keyed["eva"])
    assert keyed["eva"].get("/sessions/hers").status == UNKNOWN
    assert keyed["eva"].delete("/sessions/hers").status == UNKNOWN


def listed(caller: Caller) -> set[str]:
    return {each["id"] for each in caller.get("/sessions?limit=1000").json["data"]}


def test_sessions_of_models_that_a_key_may_not_use_are_invisible(
    keyed: dict[str, Caller], client: Client
) -> None:
    with Client(client.path, on_behalf_of="@bob") as behalf:
        for name, model in (("seen", "echo"), ("hidden", "other")):
            with behalf.session(model, session_id=name) as session:
                session.chat("x")
    bob = keyed["bob"]
    assert listed(bob) & {"seen", "hidden"} == {"seen"}
    for method, path, fields in (
        ("GET", "", None),
        ("POST", "/fork", {}),
        ("POST", "/rewind", {"turns": 1}),
        ("POST", "/cancel", {}),
        ("DELETE", "", None),
    ):
        assert bob.send(method, f"/sessions/hidden{path}", fields).status == UNKNOWN
    assert bob.post("/sessions", model="other").json["error"]["code"] == "model_not_found"


def test_a_caller_learns_its_rights(keyed: dict[str, Caller], http: RunningGateway) -> None:
    limits: dict[str, int | None] = {"requests_max": None, "tokens_per_minute": None}
    limits |= dict.fromkeys(("tokens_per_day", "tokens_per_month"))
    limits |= dict.fromkeys(("seconds_per_day", "seconds_per_month"))
    limits |= {"streams_max": 16}
    assert Caller(http).get("/caller").json == {
        "object": "caller",
        "name": "",
        "rights": ["use"],
        "priority_max": "normal",
        "models": None,
        "limits": limits,
    }
    ada, bob, olga = (keyed[name].get("/caller").json for name in ("ada", "bob", "olga"))
    assert (ada["name"], ada["priority_max"]) == ("ada", "high")
    assert bob["models"] == ["echo"]
    assert olga["rights"] == ["use", "manage"]


def test_pages_of_other_sites_reach_no_path(http: RunningGateway) -> None:
    foreign = (
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "no-cors"},
    )
    for step in STEPS.values():
        for headers in foreign:
            assert send(Caller(http, **headers), step) == DENIED, (step, headers)
    plain = {"Content_Type": "text/plain", "Sec_Fetch_Site": "same-origin"}
    for step in STEPS.values():
        if step.method == "POST":
            assert send(Caller(http, **plain), step) == HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    own = {"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"}
    assert Caller(http, **own).get("/queue").status == OK


@pytest.mark.parametrize("name", ["echo", "ECHO", "echo:latest", "Echo:LATEST"])
def test_a_caller_uses_its_models_by_names_in_other_forms(
    keyed: dict[str, Caller], name: str
) -> None:
    """The name is looked for among the caller's models, so that no other model is reached."""
    bob = keyed["bob"]
    shown = bob.send("POST", "/sessions", {"model": name})
    assert shown.status == OK and shown.json["model"] == "echo"
    other = name.replace("echo", "other").replace("ECHO", "OTHER").replace("Echo", "Other")
    assert bob.send("POST", "/sessions", {"model": other}).status == UNKNOWN
    status = keyed["olga"].send("POST", "/models/load", {"model": other})
    assert status.status == OK and status.json["id"] == "other"
