"""Usage of turns, texts and tensors by user, label and key: kills, full disks, and access."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import (
    Busy,
    Cancelled,
    ConnectionLost,
    InferdError,
    InvalidArgument,
    PermissionDenied,
    QuotaExceeded,
)
from inferd.testing import RunningDaemon, running_daemon
from inferd.wire.frames import pack_frame
from tests.daemon.command_line import document, inferd
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.daemon.test_named_states import full_disk
from tests.echo import echo_model
from tests.raw import Closed, RawClient
from tests.repetitions import repetitions
from tests.waiting import wait_until

CONFIG = echo_model("m", slots=4, step_ms=1, **{"ctx-size": 4096})
AMOUNTS = ("requests", "refused", "prompt_tokens", "cached_tokens", "generated_tokens")
MARKS = 2
"""Tokens of a raw prompt of `echo` besides its characters."""
PROMPT = "once upon a time there was a cat"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with daemon_for_all(CONFIG) as running:
        yield running


def amounts(row: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(row[name]) for name in AMOUNTS)


def usage(client: RawClient, *by: str, **params: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.call("usage", by=list(by), **params)["usage"]
    return found


def one(client: RawClient, **params: Any) -> tuple[int, ...]:
    """Return the one sum of a client's usage."""
    [row] = usage(client, **params) or [dict.fromkeys(AMOUNTS, 0)]
    return amounts(row)


_labels = (f"label-{number}" for number in count())


@contextmanager
def labelled(daemon: RunningDaemon, **hello: Any) -> Iterator[RawClient]:
    """Yield a client with a label of its own."""
    with RawClient(daemon.socket, label=next(_labels), **hello) as client:
        yield client


def chat(client: RawClient, context: int, prompt: str = PROMPT, **options: Any) -> dict[str, Any]:
    return dict(
        client.call("chat", context=context, prompt=prompt, raw=True, options=options)["metadata"]
    )


def test_a_turn_counts_as_its_metadata_says(daemon: RunningDaemon) -> None:
    with labelled(daemon) as client:
        context = client.context("m")
        turns = [chat(client, context) for _ in range(3)]
        expected = [len(turns), 0]
        expected += [sum(t[name] for t in turns) for name in ("input_tokens", "cached_tokens")]
        assert one(client) == (*expected, sum(t["output_tokens"] for t in turns))
        [row] = usage(client, "model")
        assert row["model"] == "m" and row["uid"] is None and row["start"] is None
        assert 0 < row["compute_s"] < 60


def test_the_compute_time_of_a_step_is_divided_among_its_turns() -> None:
    config = echo_model("slow", slots=4, step_ms=20, **{"ctx-size": 1024})
    with running_daemon(config) as own, RawClient(own.socket) as client:
        contexts = [client.context("slow") for _ in range(4)]
        frames = [
            pack_frame([1, number, "chat", {"context": context, "prompt": "x" * 20, "raw": True}])
            for number, context in enumerate(contexts, 100)
        ]
        client.send_bytes(b"".join(frames))  # so that none begins much later
        times = [
            client.wait_result(number)["metadata"]["predicted_ms"] for number in range(100, 104)
        ]
        [row] = usage(client)
        assert row["requests"] == 4
        assert 0.2 < row["compute_s"] < sum(times) / 1000 / 2, "turns shared their steps"


def test_embeddings_and_tensors_count(daemon: RunningDaemon) -> None:
    with labelled(daemon) as client:
        graph = client.call("load_by_name", name="m")["graph"]
        found = client.call("embed", graph=graph, texts=["a", "bc", "def"])
        tokens = sum(found["tokens"])
        assert one(client) == (3, 0, tokens, 0, 0)
        context = client.call("init_execution_context", graph=graph)["context"]
        tensor = {"data": b"\0" * 8, "dimensions": [2], "type": "fp32"}
        client.call("compute", context=context, inputs=[["x", tensor]])
        assert one(client) == (4, 0, tokens, 0, 0)


def test_a_cancelled_turn_counts_up_to_its_end(daemon: RunningDaemon) -> None:
    with labelled(daemon) as client:
        context = client.context("m")
        number = client.start_request(
            "stream", context=context, prompt="y" * 2000, raw=True, credit=9
        )
        client.events.append(client.read_message())
        with RawClient(daemon.socket) as other:
            assert other.call("cancel", context=context)["cancelled"]
        with pytest.raises(Cancelled) as refused:
            client.wait_result(number)
        metadata = refused.value.data["metadata"]
        expected = metadata["input_tokens"], metadata["cached_tokens"], metadata["output_tokens"]
        assert one(client) == (1, 0, *expected)
        assert 0 < metadata["output_tokens"] < 2000


def test_a_turn_under_way_is_counted_up_to_now(daemon: RunningDaemon) -> None:
    with labelled(daemon) as client:
        context = client.context("m")
        number = client.start_request(
            "stream", context=context, prompt="z" * 500, raw=True, credit=5
        )
        for _ in range(5):
            client.events.append(client.read_message())
        requests, _, prompt, _, generated = one(client)
        assert (requests, prompt) == (0, 500 + MARKS) and generated >= 5
        client.write([1, 99, "cancel", {"context": context}])
        with pytest.raises(Cancelled):
            client.wait_result(number)


def test_refused_requests_count_as_refused_only() -> None:
    config = "[daemon]\ntasks-waiting-max = 1\n" + echo_model("one", slots=1, step_ms=5)
    with running_daemon(config) as own, RawClient(own.socket) as client:
        contexts = [client.context("one") for _ in range(3)]
        long = {"prompt": "x" * 2000, "priority": "high", "credit": 1000}
        number = client.start_request("stream", context=contexts[0], raw=True, **long)
        client.events.append(client.read_message())
        client.start_request("stream", context=contexts[1], prompt="x", raw=True)
        for _ in range(3):
            with pytest.raises(Busy):
                chat(client, contexts[2])
        assert one(client)[:2] == (0, 3)
        [row] = usage(client, "model")
        assert row["model"] == "one"
        client.call("cancel", context=contexts[0])
        with pytest.raises(Cancelled):
            client.wait_result(number)


# Who sees what.


def test_users_see_their_own_usage_and_administrators_all(daemon: RunningDaemon) -> None:
    with client_of(daemon, ADA) as ada, client_of(daemon, BOB) as bob:
        chat(ada, ada.context("m"), "from ada")
        for _ in range(2):
            chat(bob, bob.context("m"), "from bob")
        assert {(row["uid"], row["requests"]) for row in usage(ada, "user")} == {(ADA, 1)}
        assert {(row["uid"], row["requests"]) for row in usage(bob, "user", "model")} == {(BOB, 2)}
        with pytest.raises(PermissionDenied):
            usage(ada, "user", all=True)
    with RawClient(daemon.socket) as root:
        found = {row["uid"]: row["requests"] for row in usage(root, "user", all=True)}
        assert (found[ADA], found[BOB]) == (1, 2)
        assert ADA not in {row["uid"] for row in usage(root, "user")}


def test_labels_and_keys_see_their_own_usage(daemon: RunningDaemon) -> None:
    def connect(**hello: Any) -> RawClient:
        return RawClient(daemon.socket, on_behalf_of="@shared", **hello)

    with (
        connect(key="phone") as phone,
        connect(key="tablet") as tablet,
        connect(label="job") as job,
    ):
        for client in (phone, phone, tablet, job):
            chat(client, client.context("m"))
        assert one(phone)[0] == 2 and one(tablet)[0] == 1 and one(job)[0] == 1
        [row] = usage(phone, "user", "key")
        assert (row["user"], row["key"]) == ("@shared", "phone")
        with connect() as whole:
            found = {(r["key"], r["label"]): r["requests"] for r in usage(whole, "key", "label")}
            assert found == {("phone", ""): 2, ("tablet", ""): 1, ("", "job"): 1}


def test_a_hundred_users_have_a_row_each(daemon: RunningDaemon) -> None:
    names = [f"@crowd-{number}" for number in range(100)]
    for name in names:
        with RawClient(daemon.socket, on_behalf_of=name) as client:
            chat(client, client.context("m"), "hi")
    with RawClient(daemon.socket) as root:
        found = {r["user"]: r["requests"] for r in usage(root, "user", all=True)}
        assert [found.get(name) for name in names] == [1] * 100


def test_a_key_with_control_characters_is_refused(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket, key="a\nb") as client, pytest.raises((InvalidArgument, Closed)):
        client.call("queue")


@pytest.mark.parametrize(
    "params",
    [{"by": ["prompt"]}, {"by": ["hour", "day"]}, {"by": ["user", "user"]}, {"since_s": -1.0},
     {"since_s": 1e300}],
)  # fmt: skip
def test_queries_that_make_no_sense_are_refused(daemon: RunningDaemon, params: Any) -> None:
    with RawClient(daemon.socket) as client, pytest.raises(InvalidArgument):
        client.call("usage", **params)


# Restarts and faults.


def test_usage_is_there_after_a_stop_and_within_the_hour_in_the_same_rows() -> None:
    with running_daemon(CONFIG) as own:
        with Client(own.socket) as client, client.session("m") as session:
            session.chat("hello")
            before = client.usage(["hour", "model"])
        own.stop()
        own.start_again()
        with Client(own.socket) as client, client.session("m") as session:
            assert client.usage(["hour", "model"]) == before
            session.chat("hello")
            after = client.usage([])
            assert [row["requests"] for row in after] == [2]
            assert client.usage(["day", "user"])[0]["uid"] == 0
            assert client.usage(since=1.0), "the hour has just begun, or it is this one"


def test_on_a_full_disk_requests_go_on_and_usage_is_written_later() -> None:
    with running_daemon(CONFIG) as own:
        with Client(own.socket) as client, client.session("m") as session:
            session.chat("hello")
            with full_disk(own.pid):
                for _ in range(5):
                    assert str(session.chat("hello"))
                assert client.usage([])[0]["requests"] == 6, "in memory"
                assert client.stats()["journal"]["state"] == "failing"
            wait_until(lambda: client.stats()["journal"]["state"] == "written")
        assert own.log.count("journal.not_written") <= 1
        own.kill()
        own.start_again()
        with Client(own.socket) as client:
            assert client.usage([])[0]["requests"] == 6


class Worker(threading.Thread):
    """Makes turns until the daemon is killed, each in a session of its own or in one without id."""

    def __init__(self, socket: str, label: str, *, durable: bool, ids: Iterator[int]):
        super().__init__()
        self.label, self.durable = label, durable
        self.delivered = self.tokens = 0
        self._socket, self._ids = socket, ids

    def run(self) -> None:
        try:
            with Client(self._socket, label=self.label) as client:
                while True:
                    name = f"{self.label}-{next(self._ids)}" if self.durable else None
                    with client.session("m", session_id=name, raw=True) as session:
                        answer = session.chat(PROMPT)
                        self.tokens += answer.metadata["output_tokens"]
                        self.delivered += 1
        except (ConnectionLost, InferdError):
            return


def test_sums_equal_the_turns_delivered_however_often_the_daemon_is_killed() -> None:
    """Each kill falls somewhere into the writes of four clients. The turns of sessions with an id
    are compared with the journal, in which the same transactions have written them.
    """
    labels = {"named-0": True, "named-1": True, "plain-0": False, "plain-1": False}
    delivered, tokens = dict.fromkeys(labels, 0), dict.fromkeys(labels, 0)
    ids, kills = count(), repetitions(6)
    limits = "[daemon]\ndormant-sessions-max = 100000\nsessions-max = 1000\n"
    with running_daemon(limits + CONFIG) as own:
        for number in range(kills):
            workers = [
                Worker(own.socket, label, durable=durable, ids=ids)
                for label, durable in labels.items()
            ]
            for worker in workers:
                worker.start()
            wait_until(lambda: all(w.delivered > 2 + 3 * number for w in workers))  # noqa: B023
            own.kill()
            for worker in workers:
                worker.join()
                delivered[worker.label] += worker.delivered
                tokens[worker.label] += worker.tokens
            own.start_again()
        with RawClient(own.socket) as client:
            found = {row["label"]: row for row in usage(client, "label")}
            stored = client.call("sessions", dormant=True)["sessions"]
    for label, durable in labels.items():
        row = found[label]
        assert delivered[label] <= row["requests"] <= delivered[label] + kills
        assert row["generated_tokens"] >= tokens[label]
        if durable:
            own_sessions = [s for s in stored if s["label"] == label]
            ended = [s for s in own_sessions if s["turns"] and not s["interrupted"]]
            prompt_tokens = len(PROMPT) + MARKS
            output = sum(s["tokens"] - prompt_tokens for s in own_sessions if s["tokens"])
            assert row["requests"] == len(ended)
            # A history does not have the token that ended the turn.
            assert row["generated_tokens"] == output + len(ended)


def test_an_interrupted_turn_counts_once_when_it_is_resumed() -> None:
    with running_daemon(echo_model("slow", slots=1, step_ms=3, **{"ctx-size": 4096})) as own:
        with RawClient(own.socket) as client:
            graph = client.call("load_by_name", name="slow")["graph"]
            call = "init_execution_context_with_session_id"
            context = client.call(call, graph=graph, session_id="s")["context"]
            client.start_request("stream", context=context, prompt="w" * 300, raw=True, credit=1000)
            wait_until(
                lambda: usage(client)[0]["generated_tokens"] > 40 if usage(client) else False
            )
        own.kill()
        own.start_again()
        with RawClient(own.socket) as client:
            [row] = usage(client)
            assert row["requests"] == 0 and row["prompt_tokens"] == 300 + MARKS
            assert 0 < row["generated_tokens"] < 300
            graph = client.call("load_by_name", name="slow")["graph"]
            context = client.call(call, graph=graph, session_id="s")["context"]
            metadata = client.call("resume", context=context, tokens=[], credit=1000)["metadata"]
            [row] = usage(client)
            assert row["requests"] == 1 and row["prompt_tokens"] == 300 + MARKS
            assert row["generated_tokens"] == metadata["output_tokens"] >= 300


# The command.


def test_the_command_shows_usage_as_a_table_and_as_json(daemon: RunningDaemon) -> None:
    with labelled(daemon) as client:
        chat(client, client.context("m"))
        label = client.call("usage", by=["label"])["usage"][0]["label"]
    arguments = ("usage", "--label", label)
    shown = inferd(*arguments, "--by", "day", "--by", "model", socket=daemon.socket).stdout
    head, line = shown.splitlines()
    assert head.split()[:4] == ["DAY", "(UTC)", "MODEL", "REQUESTS"]
    assert line.split()[1:3] == ["m", "1"]
    found = document(inferd(*arguments, "--json", socket=daemon.socket))
    assert found["usage"][0]["requests"] == 1
    wrong = inferd("usage", "--by", "colour", socket=daemon.socket)
    assert wrong.exit_code == 2 and "'colour' is not one of hour, day, user" in wrong.stderr
    assert inferd("usage", "--since", "7x", socket=daemon.socket).exit_code == 2
    everybody = inferd("usage", "--all", "--by", "user", socket=daemon.socket)
    assert everybody.exit_code == 0 and "USER" in everybody.stdout


# Limits.

LIMITED = CONFIG + "[access.all]\nusers = [0]\nallow = ['use', 'manage', 'see-all', 'delegate']\n"


def test_at_its_limit_a_user_is_refused_until_the_day_ends_also_after_a_kill() -> None:
    with running_daemon(LIMITED + "tokens-per-day = 40\n") as own:
        with RawClient(own.socket) as client:
            context = client.context("m")
            chat(client, context)
            with pytest.raises(QuotaExceeded) as refused:
                chat(client, context)
            data = refused.value.data
            assert data["bound"] == "access.all.tokens-per-day" and data["tokens_per_day"] == 40
            assert 0 < data["retry_after_s"] <= 86_401 and data["tokens"] > 40
            graph = client.call("load_by_name", name="m")["graph"]
            with pytest.raises(QuotaExceeded):
                client.call("embed", graph=graph, texts=["a"])
            assert one(client)[:2] == (1, 2)
            [limit] = client.call("usage")["limits"]
            assert limit["bound"] == "tokens-per-day" and limit["used"] == data["tokens"]
            shown = inferd("usage", socket=own.socket).stdout
            assert f"tokens-per-day: {data['tokens']} of 40, until " in shown
        own.kill()
        own.start_again()
        with RawClient(own.socket) as client, pytest.raises(QuotaExceeded):
            chat(client, client.context("m"))


def test_a_turn_that_has_begun_is_not_cut_off_by_a_limit() -> None:
    with running_daemon(LIMITED + "tokens-per-month = 5\n") as own, RawClient(own.socket) as client:
        context = client.context("m")
        client.set_input(context, b"x" * 20)
        pieces = [client.compute_single(context) for _ in range(15)]
        assert b"".join(pieces) == b"x" * 15
        with pytest.raises(QuotaExceeded):
            chat(client, client.context("m"))


def test_a_change_of_the_rules_holds_at_once() -> None:
    before, after = "seconds-per-day = 1000\n", "tokens-per-day = 1\n"
    with running_daemon(LIMITED + before) as own, RawClient(own.socket) as client:
        context = client.context("m")
        chat(client, context)
        (own.directory / "config.toml").write_text(LIMITED + after)
        os.kill(own.pid, signal.SIGHUP)
        wait_until(lambda: client.call("usage")["limits"][0]["bound"] == "tokens-per-day")
        with pytest.raises(QuotaExceeded):
            chat(client, context)


def test_a_key_has_limits_of_its_own(daemon: RunningDaemon) -> None:
    hello: dict[str, Any] = {"on_behalf_of": "@keyed", "key_limits": {"tokens_per_day": 40}}
    with (
        RawClient(daemon.socket, key="phone", **hello) as phone,
        RawClient(daemon.socket, key="tablet", **hello) as tablet,
    ):
        chat(phone, phone.context("m"))
        with pytest.raises(QuotaExceeded) as refused:
            chat(phone, phone.context("m"))
        assert refused.value.data["bound"] == "tokens-per-day"
        chat(tablet, tablet.context("m"))


def test_metrics_have_the_compute_time_and_the_refusals_of_models_and_no_users(
    daemon: RunningDaemon,
) -> None:
    with labelled(daemon) as client:
        chat(client, client.context("m"))
        metrics = client.call("stats")["stats"]["metrics"]
    [row] = [each for each in metrics["usage_compute_seconds"] if each["model_name"] == "m"]
    assert row["value"] > 0 and set(row) == {"model_name", "value"}
    assert metrics["usage_unwritten_rows"][0]["value"] >= 0
