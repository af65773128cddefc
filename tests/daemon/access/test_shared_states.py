"""Named states that access rules share: others begin sessions with them, and neither side learns
more of the other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd import Client
from inferd.backends.errors import InferdError, NotFound, QuotaExceeded
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd
from tests.daemon.other_users import ADA, BOB, as_user
from tests.echo import echo_model
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

STORY = "Once upon a time there was a king who had three sons and a golden bird. " * 4
KINDS = ("llama", "gemma3", "mamba", "lfm2")
GREEDY: dict[str, Any] = {"temp": 0, "n-predict": 12}
CAROL, SMALL, GATEWAY, GROUP = 54323, 54324, 54325, 54330
READERS = range(54400, 54420)
SHARED = f"{ADA}/story"
RULES = f"""
[access.readers]
users = [{BOB}]
groups = [{GROUP}]
states = ["{SHARED}", "{ADA}/agent/notes", "root/story", "{ADA}/missing"]
[access.small]
users = [{SMALL}]
states = ["{SHARED}"]
session-bytes-max = 12000
[access.gateway]
users = [{GATEWAY}]
allow = ["use", "delegate"]
[access.guests]
users = ["{GATEWAY}@guest"]
states = ["{GATEWAY}@host/story"]
"""


def head(rules: str = RULES) -> str:
    return f"[daemon]\nsocket-mode = '0666'\nsessions-max = 200\n{rules}"


@contextmanager
def daemon_with(models: str, rules: str = RULES) -> Iterator[RunningDaemon]:
    with running_daemon(head(rules) + models) as running:
        os.chmod(running.directory, 0o711)
        yield running


def tiny_models(folder: Path) -> str:
    models = [f'[models.{k}]\nfile = "{write_tiny(k, folder)}"\n' for k in KINDS]
    return "".join(f"{model}threads = 1\nctx-size = 1024\nslots = 2\n" for model in models)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tiny_models(tmp_path_factory.mktemp("models")) + echo_model("e", slots=2)
    with daemon_with(models) as running:
        yield running


@contextmanager
def connected(
    daemon: RunningDaemon, uid: int, label: str = "", group: int = 0, on_behalf_of: str = ""
) -> Iterator[Client]:
    with as_user(uid, [group] if group else []):
        client = Client(daemon.socket, label=label, on_behalf_of=on_behalf_of).open()
    with client:
        yield client


@pytest.fixture
def ada(daemon: RunningDaemon) -> Iterator[Client]:
    with connected(daemon, ADA) as client:
        yield client
        for state in client.list_states():
            client.delete_state(state["name"])


@pytest.fixture
def bob(daemon: RunningDaemon) -> Iterator[Client]:
    with connected(daemon, BOB) as client:
        yield client


def save(client: Client, model: str, name: str = "story") -> tuple[str, int]:
    """Save a state; return how its session then continues, and its number of tokens."""
    with client.session(model, raw=True, options=GREEDY) as session:
        session.chat(STORY)
        saved = session.save_state(name)
        assert saved.stored_tokens == saved.tokens
        return str(session.chat(" And then")), saved.tokens


def continued(
    client: Client, model: str, name: str = SHARED, text: str = " And then"
) -> tuple[str, int]:
    """Return how a session from a state continues, and its number of cached tokens."""
    with client.session(model, raw=True, from_state=name) as session:
        answer = session.chat(text)
        return str(answer), answer.metadata["cached_tokens"]


def refusal(client: Client, name: str, model: str = "e") -> dict[str, Any]:
    """Return the error of a session from a state, with its name left out."""
    with pytest.raises(InferdError) as caught, client.session(model, from_state=name):
        pass
    wire = caught.value.to_wire()
    return {key: str(value).replace(repr(name), "NAME") for key, value in wire.items()}


def kv_files(daemon: RunningDaemon, uid: int) -> list[Path]:
    folder = daemon.directory / "state" / "kv"
    return [path for path in folder.rglob("*") if path.is_file() and path.parent.name == str(uid)]


def kill_worker(client: Client, model: str) -> None:
    [pid] = [m["pid"] for m in client.models() if m["name"] == model]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in [m["pid"] for m in client.models()])


# Sessions from a shared state.


@pytest.mark.parametrize("model", KINDS)
def test_a_session_from_a_shared_state_continues_as_the_saved_one_did(
    ada: Client, bob: Client, model: str
) -> None:
    expected, tokens = save(ada, model)

    answer, cached = continued(bob, model)

    assert answer == expected
    assert cached >= tokens - 1
    assert continued(bob, model)[0] == expected
    assert continued(ada, model, "story")[0] == expected


def test_its_history_and_parameters_can_be_read(ada: Client, bob: Client) -> None:
    with ada.session("llama", system="Be brief.", options=GREEDY) as session:
        session.save_state("story")
        expected = session.chat("Who are you?")
    with bob.session("llama", from_state=SHARED) as session:
        assert session.history().messages == [{"role": "system", "content": "Be brief."}]
        assert session.chat("Who are you?") == expected


def test_a_state_of_a_label_is_shared_by_its_label(daemon: RunningDaemon, bob: Client) -> None:
    with connected(daemon, ADA, label="agent") as agent:
        expected, _ = save(agent, "e", "notes")
        assert continued(bob, "e", f"{ADA}/agent/notes")[0] == expected
        refusal(bob, f"{ADA}/notes")
        agent.delete_state("notes")


def test_an_owner_has_a_name_and_a_number(daemon: RunningDaemon, bob: Client) -> None:
    with Client(daemon.socket) as root:
        expected, _ = save(root, "e")
        assert continued(bob, "e", "root/story")[0] == expected
        assert continued(bob, "e", "0/story")[0] == expected
        assert [(s["name"], s["shared_by"]) for s in bob.list_states()] == [("root/story", 0)]
        root.delete_state("story")


def test_users_of_a_gateway_share_states(daemon: RunningDaemon) -> None:
    with (
        connected(daemon, GATEWAY, on_behalf_of="@host") as host,
        connected(daemon, GATEWAY, on_behalf_of="@guest") as guest,
        connected(daemon, GATEWAY, on_behalf_of="@other") as other,
        connected(daemon, GATEWAY) as gateway,
    ):
        expected, _ = save(host, "e")
        name = f"{GATEWAY}@host/story"
        assert continued(guest, "e", name)[0] == expected
        for client in (other, gateway):
            assert refusal(client, name)["name"] == NotFound.name
        host.delete_state("story")


def test_the_command_lists_shared_states_with_their_owner(
    daemon: RunningDaemon, ada: Client
) -> None:
    save(ada, "e")
    with as_user(BOB):
        shown = inferd("states", socket=daemon.socket).stdout
    assert "SHARED BY" in shown and SHARED in shown
    with as_user(ADA):
        assert "SHARED BY" not in inferd("states", socket=daemon.socket).stdout


def test_members_of_a_group_begin_with_a_state_at_once(daemon: RunningDaemon, ada: Client) -> None:
    expected, tokens = save(ada, "llama")
    with ExitStack() as stack:
        readers = [stack.enter_context(connected(daemon, u, group=GROUP)) for u in READERS]
        with ThreadPoolExecutor(len(readers)) as pool:
            found = list(pool.map(lambda reader: continued(reader, "llama"), readers))
    assert {answer for answer, _ in found} == {expected}
    assert min(cached for _, cached in found) >= tokens - 1


# Refusals.


def test_a_state_that_is_not_shared_is_answered_as_one_that_does_not_exist(
    daemon: RunningDaemon, ada: Client, bob: Client
) -> None:
    save(ada, "e")
    save(ada, "e", "secret")
    with connected(daemon, CAROL) as carol:
        none = refusal(carol, "none")
        assert none["name"] == NotFound.name
        for name in (SHARED, f"{ADA}/secret", f"{ADA}/none", "story", "nobody/story", "/story"):
            assert refusal(carol, name) == none
        assert not carol.list_states()
    for name in (f"{ADA}/secret", f"{ADA}/missing", "story", f"{ADA}//story", f"{ADA}/agent/story"):
        assert refusal(bob, name) == none


def test_a_reader_changes_nothing_of_the_owners(ada: Client, bob: Client) -> None:
    expected, _ = save(ada, "e")
    before = ada.list_states()
    assert [(s["name"], s["shared_by"]) for s in bob.list_states()] == [(SHARED, ADA)]
    assert not bob.delete_state(SHARED) and not bob.delete_state("story")
    with bob.session("e", raw=True, from_state=SHARED) as session:
        session.chat(" And then")
        own = session.save_state(SHARED)  # a state of Bob's, which now has this name for Bob
    assert [s["shared_by"] for s in bob.list_states()] == [None, ADA]
    assert continued(bob, "e")[1] >= own.tokens - 1
    assert ada.list_states() == before
    assert continued(ada, "e", "story")[0] == expected
    assert bob.delete_state(SHARED)
    assert continued(bob, "e")[0] == expected


def test_a_state_that_is_too_large_for_the_reader_is_refused_with_a_hint(
    daemon: RunningDaemon, ada: Client
) -> None:
    save(ada, "e")
    with connected(daemon, SMALL) as small:
        with pytest.raises(QuotaExceeded, match=r"close sessions") as caught:
            continued(small, "e")
        assert caught.value.data["bound"] == "access.small.session-bytes-max"
        with small.session("e", raw=True) as session:
            session.chat("hi")


# Isolation.


@pytest.mark.parametrize("model", [*KINDS, "e"])
def test_neither_side_finds_turns_of_the_other(
    daemon: RunningDaemon, ada: Client, bob: Client, model: str
) -> None:
    _, tokens = save(ada, model)
    secret = "the treasure lies under the third oak behind the old mill. " * 2

    most = tokens + 4  # all continuations have their first tokens in common

    continued(bob, model, SHARED, "#" + secret)
    assert continued(bob, model, SHARED, "#" + secret)[1] > most, "it is Bob's"
    assert continued(ada, model, "story", "#" + secret)[1] <= most
    continued(ada, model, "story", "%" + secret)
    assert continued(ada, model, "story", "%" + secret)[1] > most, "it is Ada's"
    assert continued(bob, model, SHARED, "%" + secret)[1] <= most

    with connected(daemon, CAROL) as carol, carol.session(model, raw=True) as session:
        assert session.chat(STORY, options=GREEDY).metadata["cached_tokens"] == 0


def test_another_history_of_a_session_finds_nothing_of_the_owners(ada: Client, bob: Client) -> None:
    secret = STORY.swapcase()
    with ada.session("e") as hers:
        ada.set_input(hers.context, 0, STORY.encode())
        tokens = hers.save_state("story").tokens
        with bob.session("e", from_state=SHARED) as session:
            ada.set_input(hers.context, 0, secret.encode())
            assert hers.save_state("story", replace=True).tokens == tokens
            bob.set_input(session.context, 0, secret.encode())
            bob.compute(session.context)
            metadata = msgspec.json.decode(bob.get_output(session.context, index=1))
    assert metadata["input_tokens"] + metadata["cached_tokens"] >= tokens
    assert metadata["cached_tokens"] <= 1, "all prompts begin with the same token"


# Changes and failures.


def test_sessions_go_on_after_the_state_was_deleted(ada: Client, bob: Client) -> None:
    expected, _ = save(ada, "llama")
    with (
        bob.session("llama", raw=True, from_state=SHARED) as new,
        bob.session("llama", raw=True, from_state=SHARED, session_id="diary") as used,
    ):
        assert used.chat(" And then") == expected
        ada.delete_state("story")
        assert new.chat(" And then") == expected
        assert used.chat(" And so")
    assert refusal(bob, SHARED, "llama")["name"] == NotFound.name
    with bob.session("llama", raw=True, from_state=SHARED, session_id="diary") as session:
        assert session.attached, "an existing session needs no state"
        session.delete()


def test_a_turn_after_the_death_of_a_worker_computes_no_token_of_the_state(
    daemon: RunningDaemon, ada: Client, bob: Client
) -> None:
    expected, tokens = save(ada, "llama")
    with bob.session("llama", raw=True, from_state=SHARED) as session:
        kill_worker(ada, "llama")
        answer = session.chat(" And then")
        assert answer == expected
        assert answer.metadata["cached_tokens"] >= tokens - 1
        kill_worker(ada, "llama")
        assert session.chat(" And so").metadata["cached_tokens"] >= tokens - 1


def test_a_shared_state_outlives_the_daemon(tmp_path: Path) -> None:
    with daemon_with(tiny_models(tmp_path)) as own:
        with connected(own, ADA) as ada:
            expected, tokens = save(ada, "llama")
        for end in (own.stop, own.stop, own.kill, own.kill):
            end()
            own.start_again()
            assert not kv_files(own, BOB)
            with connected(own, BOB) as bob:
                answer, cached = continued(bob, "llama")
                assert answer == expected
                assert cached >= tokens - 1


def test_a_session_with_an_id_is_stored_as_the_readers_own(tmp_path: Path) -> None:
    with daemon_with(tiny_models(tmp_path)) as own:
        with connected(own, ADA) as ada:
            _, tokens = save(ada, "llama")
        with (
            connected(own, BOB) as bob,
            bob.session("llama", raw=True, from_state=SHARED, session_id="diary") as session,
        ):
            session.chat(" And then")
        own.stop()
        assert len(kv_files(own, BOB)) == 1 and kv_files(own, ADA)
        own.start_again()
        with connected(own, ADA) as ada, connected(own, BOB) as bob:
            ada.delete_state("story")
            with bob.session("llama", raw=True, session_id="diary") as session:
                assert session.chat(" And so").metadata["cached_tokens"] > tokens
                session.delete()
        assert not kv_files(own, BOB) and not kv_files(own, ADA)


def test_changed_rules_hold_from_the_next_opening(tmp_path: Path) -> None:
    models = tiny_models(tmp_path)
    with daemon_with(models, "") as own, connected(own, ADA) as ada, connected(own, BOB) as bob:
        expected, _ = save(ada, "llama")
        refusal(bob, SHARED, "llama")

        def reload(rules: str, shared: int) -> None:
            (own.directory / "config.toml").write_text(head(rules) + models)
            os.kill(own.pid, signal.SIGHUP)
            wait_until(lambda: len(bob.list_states()) == shared)

        reload(RULES, 1)
        with bob.session("llama", raw=True, from_state=SHARED) as session:
            reload("", 0)
            assert refusal(bob, SHARED, "llama")["name"] == NotFound.name
            assert session.chat(" And then") == expected


def test_one_state_serves_all_users_where_kv_states_do(tmp_path: Path) -> None:
    rules = "kv-share = 'all'\n" + RULES
    with daemon_with(tiny_models(tmp_path), rules) as own:
        with connected(own, ADA) as ada:
            expected, tokens = save(ada, "llama")
        own.stop()
        own.start_again()
        with connected(own, BOB) as bob:
            answer, cached = continued(bob, "llama")
        assert answer == expected and cached >= tokens - 1
