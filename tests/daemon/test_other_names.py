"""Several names of one model: parameters, ceilings and rights of each, with one process for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferd import Client
from inferd.backends.errors import InvalidArgument, ModelNotFound
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.daemon.manager import manager_of
from tests.daemon.other_users import ADA, client_of, daemon_for_all
from tests.daemon.service.test_reload import reload
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, gateway
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny

BASE = echo_model("base", slots=2, temp=0.5, **{"top-k": 7, "ctx-size": 4096})
CODER = """
[models.coder]
of = "base"
temp = 0.25
system-prompt = "You write code."
ctx-size = 256
n-predict-max = 4
priority-max = "low"
"""
PLAIN = '[models.plain]\nof = "base"\n'


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(BASE + CODER + PLAIN) as running:
        yield running


def processes(client: Client) -> dict[str, int]:
    return {model["name"]: model["pid"] for model in client.models()}


def test_names_of_one_model_share_its_process(client: Client) -> None:
    graphs = [client.load_by_name(name) for name in ("base", "coder", "plain", "CODER:latest")]
    assert [graph.model for graph in graphs] == ["base", "coder", "plain", "coder"]
    pids = processes(client)
    assert pids["base"] == pids["coder"] == pids["plain"] > 0 == pids["echo"]
    of = {model["name"]: model["of"] for model in client.models()}
    assert of == {"base": "", "coder": "base", "plain": "base", "echo": ""}
    shown = client.show("coder")
    assert shown["options"] | {"temp": 0.25, "top-k": 7, "slots": 2} == shown["options"]
    assert shown["ceilings"] == {"n-predict-max": 4, "priority-max": "low"}
    assert shown["leases"] == 2 and client.show("base")["leases"] == 4
    assert client.show("base")["names"] == ["coder", "plain"]


def test_a_names_parameters_lie_between_the_requests_and_the_models(client: Client) -> None:
    with client.session("coder") as session:
        values = {p["name"]: (p["value"], p["origin"]) for p in session.parameters()}
        assert values["temp"] == (0.25, "model") and values["top-k"] == (7, "model")
        session.set_options(temp=1.0)
        values = {p["name"]: (p["value"], p["origin"]) for p in session.parameters()}
        assert values["temp"] == (1.0, "session")


def test_a_chat_begins_with_the_system_prompt_unless_it_has_one(client: Client) -> None:
    with client.session("coder") as session:
        session.chat("hi")
        assert roles(session.history().messages) == ["system", "user", "assistant"]
        assert session.history().messages[0]["content"] == "You write code."
        session.chat("again")
        assert roles(session.history().messages).count("system") == 1
        session.reset()
        session.chat("after a reset")
        assert roles(session.history().messages) == ["system", "user", "assistant"]
    with client.session("coder", system="mine") as session:
        session.chat("hi")
        assert [m["content"] for m in session.history().messages if m["role"] == "system"] == [
            "mine"
        ]
    with client.session("plain") as session:
        session.chat("hi")
        assert roles(session.history().messages) == ["user", "assistant"]


def roles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


def test_ceilings_bound_turns_whatever_they_request(daemon: RunningDaemon, client: Client) -> None:
    with client.session("coder") as session:
        stream = session.stream("abcdefghij", raw=True, n_predict=8, priority="urgent")
        assert "".join(stream) == "abcd"
        metadata = session.metadata
        assert metadata["adjusted"]["n-predict"] == (
            "models.coder.n-predict-max allows 4 tokens of an answer"
        )
    with RawClient(daemon.socket) as raw:
        graph = raw.call("load_by_name", name="coder")["graph"]
        context = raw.call("init_execution_context", graph=graph)["context"]
        params = {"prompt": "abcd", "raw": True, "credit": 1, "priority": "urgent"}
        raw.start_request("stream", context=context, **params)
        raw.events.append(raw.read_message())
        assert [task["priority"] for task in raw.call("queue")["tasks"]] == ["low"]
    with client.session("plain") as session:
        assert "".join(session.stream("abcdefghij", raw=True, n_predict=8)) == "abcdefgh"


def test_a_names_context_is_at_most_its_own(client: Client) -> None:
    graph = client.load_by_name("coder")
    assert graph.ctx_size == 256
    larger = client.load_by_name_with_config("coder", {"ctx-size": 1024})
    assert larger.ctx_size == 256 and larger.not_applied == {"ctx-size": 256}
    assert client.load_by_name_with_config("coder", {"ctx-size": 64}).ctx_size == 64
    assert client.load_by_name("base").ctx_size == 4096


def test_names_share_kv_states(client: Client) -> None:
    text = "a prompt that both names compute once"
    with client.session("base") as session:
        assert "".join(session.stream(text, raw=True)) == text
    with client.session("plain") as session:
        assert "".join(session.stream(text, raw=True)) == text
        assert session.metadata["cached_tokens"] >= len(text) - 1


def test_operators_unload_and_pin_the_model_by_any_of_its_names(client: Client) -> None:
    client.pin("plain")
    assert {n: m["pinned"] for m in client.models() for n in [m["name"]]}["base"]
    client.unpin("coder")
    graph = client.load_by_name("plain")
    client.unload(graph)
    client.unload_model("coder", force=True)
    assert set(processes(client).values()) == {0}


def test_a_swap_of_or_to_another_name_is_refused(client: Client) -> None:
    for name, to in (("coder", "echo"), ("echo", "coder")):
        with pytest.raises(InvalidArgument, match="'coder' is another name of 'base'") as refusal:
            client.swap(name, to)
        assert "swap 'base'" in refusal.value.hint


def test_sessions_of_a_name_survive_a_swap_and_a_restart() -> None:
    config = BASE + CODER + echo_model("other", variant="2")
    with running_daemon(config) as daemon:
        with Client(daemon.socket) as client:
            with client.session("coder", session_id="kept") as session:
                session.chat("one")
                client.swap("base", "other")
                session.chat("two")
                before = session.history().messages
            assert client.show("coder")["swapped_to"] == "other"
        daemon.stop()
        daemon.start_again()
        with Client(daemon.socket) as client:
            with client.session("coder", session_id="kept") as session:
                assert session.attached and session.history().messages == before
                session.chat("three")
                assert roles(session.history().messages).count("system") == 1
            [stored] = client.sessions(dormant=True)
            assert stored["model"] == "coder"


def test_a_reload_changes_names_without_unloading_their_model() -> None:
    head = BASE + echo_model("next")
    with (
        running_daemon(head + CODER) as daemon,
        manager_of(daemon) as manager,
        RawClient(daemon.socket) as raw,
        Client(daemon.socket) as client,
    ):
        client.load_by_name("coder")
        pid = processes(client)["base"]
        changed = CODER.replace("256", "128").replace("n-predict-max = 4", "n-predict-max = 2")
        reload(daemon, manager, head + changed)
        assert processes(client)["base"] == pid
        assert client.load_by_name("coder").ctx_size == 128
        with client.session("coder") as session:
            assert "".join(session.stream("abcdef", raw=True)) == "ab"
        reload(daemon, manager, head + CODER.replace('of = "base"', 'of = "next"'))
        assert raw.call("show", name="coder")["models"][0]["of"] == "next"
        reload(daemon, manager, head + CODER.replace('of = "base"', 'of = "missing"'))
        with pytest.raises(ModelNotFound, match="'coder' is another name of 'missing'"):
            client.load_by_name("coder")
        assert "there is no model 'missing'" in str(client.stats()["components"])
        reload(daemon, manager, head)
        with pytest.raises(ModelNotFound, match="there is no model 'coder'"):
            client.load_by_name("coder")


def test_a_rule_allows_names_and_hides_all_others() -> None:
    rule = f'[access.ada]\nusers = [{ADA}]\nmodels = ["coder"]\n'
    with daemon_for_all(BASE + CODER + rule) as daemon, client_of(daemon, ADA) as ada:
        assert [model["name"] for model in ada.call("models")["models"]] == ["coder"]
        assert ada.call("load_by_name", name="coder")["model"] == "coder"
        for call in ("load_by_name", "show"):
            with pytest.raises(ModelNotFound, match="there is no model 'base'") as refusal:
                ada.call(call, name="base")
            assert refusal.value.data["models"] == ["coder"]
        with pytest.raises(ModelNotFound):
            ada.call("load", builders=[b"base"], encoding=5, target=0)


def test_an_adapter_of_a_name_applies_to_its_turns_alone(tmp_path: Path) -> None:
    (tmp_path / "loud.txt").write_text("upper")
    config = BASE + '[models.shouts]\nof = "base"\nadapters = { loud = "loud.txt" }\n'
    with running_daemon(config, models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        with client.session("shouts") as session:
            assert "".join(session.stream("Text", raw=True)) == "TEXT"
        with client.session("base") as session:
            assert "".join(session.stream("Text", raw=True)) == "Text"
        assert processes(client)["base"] == processes(client)["shouts"]


def test_metrics_count_turns_of_all_names_for_the_model(client: Client) -> None:
    with client.session("coder") as session:
        session.chat("hi")
    lines = [line for line in client.metrics().splitlines() if "model_name=" in line]
    assert any('model_name="base"' in line for line in lines)
    assert not any('model_name="coder"' in line for line in lines)


def test_ps_and_models_show_the_names(daemon: RunningDaemon, client: Client) -> None:
    client.load_by_name("coder")
    shown = inferd("ps", socket=daemon.socket).stdout
    rows = {line.split()[0]: line for line in shown.splitlines() if line}
    assert "in base" in rows["coder"] and "in base" not in rows["base"]
    listed = inferd("models", socket=daemon.socket).stdout
    assert "another name of base" in listed
    assert document(inferd("show", "coder", "--json", socket=daemon.socket))["of"] == "base"


def test_the_gateway_offers_names_and_another_num_ctx_loads_nothing_again(
    daemon: RunningDaemon, client: Client
) -> None:
    client.load_by_name("base")
    pid = processes(client)["base"]
    with (
        gateway(daemon, "--test-models") as running,
        httpx.Client(base_url=running.url, timeout=CALL_S_MAX) as web,
    ):
        listed = {each["id"]: each for each in web.get("/v1/models").json()["data"]}
        assert {"base", "coder", "plain"} <= listed.keys()
        assert listed["coder"]["max_model_len"] == 256
        tags = [each["name"] for each in web.get("/api/tags").json()["models"]]
        assert {"base", "coder", "plain"} <= set(tags)
        for size in (512, 2048, 128, 8192):
            body = {
                "model": "coder:latest" if size > 1000 else "base",
                "messages": [{"role": "user", "content": "ab"}],
                "options": {"num_ctx": size, "num_predict": 2},
                "stream": False,
            }
            answer = web.post("/api/chat", json=body)
            assert answer.status_code == 200 and answer.json()["message"]["content"] == "ab"
            assert processes(client)["base"] == pid
    with Client(daemon.socket) as second:
        assert second.show("base")["load_s"] == client.show("base")["load_s"]


def test_names_of_a_file_share_its_process_and_template(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    config = '[models.coder]\nof = "tiny-llama"\nsystem-prompt = "You write code."\n'
    config += "[defaults]\nthreads = 1\n"
    with running_daemon(config, models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        of_file, coder = client.load_by_name("tiny-llama"), client.load_by_name("coder")
        assert of_file.fingerprint == coder.fingerprint
        assert processes(client)["tiny-llama"] == processes(client)["coder"] > 0
        message = [{"role": "user", "content": "hi"}]
        prompts = [client.apply_template(graph, message) for graph in (of_file, coder)]
        assert "You write code." not in prompts[0] and "You write code." in prompts[1]
        with client.session("coder") as session:
            session.chat("hi", n_predict=1)
            assert session.history().messages[0]["content"] == "You write code."
        with pytest.raises(ModelNotFound, match="Coder2"):
            client.load_by_name("Coder2")


SHOUTS = "{% for m in messages %}<<{{ m.role | upper }}>>{{ m.content }}{% endfor %}"


def test_a_name_has_a_template_of_its_own_in_the_same_process(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    (tmp_path / "broken.jinja").write_text("{% for %}")
    config = f"""
[models.shouts]
of = "tiny-llama"
chat-template = '{SHOUTS}'
[models.broken]
of = "tiny-llama"
chat-template-file = "{tmp_path}/broken.jinja"
[defaults]
threads = 1
"""
    message = [{"role": "user", "content": "hi"}]
    with running_daemon(config, models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        names = ("tiny-llama", "shouts", "broken")
        graphs = {name: client.load_by_name(name) for name in names}
        assert len({processes(client)[name] for name in names}) == 1
        own, shouts = (client.apply_template(graphs[name], message) for name in names[:2])
        assert "<<USER>>hi" in shouts and "<<USER>>" not in own and "hi" in own
        for name, prompt in (("shouts", shouts), ("tiny-llama", own), ("shouts", shouts)):
            with client.session(name) as session:
                session.chat("hi", n_predict=2)
                assert session.metadata["input_tokens"] == prompt.tokens
        assert own.tokens != shouts.tokens
        with client.session("shouts", session_id="loud") as session:
            session.chat("hi", n_predict=2)
        with client.session("shouts", session_id="loud") as session:
            session.chat("again", n_predict=2)
            messages = session.history().messages[:-1]
            continued = client.apply_template(graphs["shouts"], messages)
            assert "<<USER>>again" in continued and session.attached
        with client.session("tiny-llama") as session:
            session.chat("hi", n_predict=2)
            assert "chat-template" not in session.metadata.get("adjusted", {})
        with pytest.raises(InvalidArgument, match=r"broken\.jinja"):
            client.apply_template(graphs["broken"], message)
        with client.session("broken") as session, pytest.raises(InvalidArgument):
            session.chat("hi", n_predict=1)
        info = client.show("shouts")["info"] or {}
        assert info["has_chat_template"] and "templates" in info and info["templates"] == {}
        assert not (client.show("broken")["info"] or {})["has_chat_template"]
