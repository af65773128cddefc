"""A user who loads many models: from descriptors, and by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import inferd
from inferd.backends.errors import LoadFailed, QuotaExceeded
from inferd.testing import RunningDaemon, running_daemon
from tests.attacks.silent_file import silent_file
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.echo import echo_model
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until


@contextmanager
def two_users(config: str) -> Iterator[tuple[RunningDaemon, RawClient, RawClient]]:
    with (
        daemon_for_all(config) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        yield daemon, ada, bob


def load_descriptor(client: RawClient, path: Path) -> dict[str, object]:
    with open(path, "rb") as file:
        found: dict[str, object] = client.call("load", [file.fileno()], fd=0)
        return found


def workers(daemon: RunningDaemon) -> int:
    return len(psutil.Process(daemon.pid).children())


def test_models_from_descriptors_have_a_bound_for_each_user(tmp_path: Path) -> None:
    one = write_tiny("llama", tmp_path)
    other = one.with_name("other.gguf")
    other.write_bytes(one.read_bytes())
    with two_users("descriptor-models-user-max = 1\n") as (daemon, ada, bob):
        graph = load_descriptor(ada, one)["graph"]
        with pytest.raises(QuotaExceeded) as caught:
            load_descriptor(ada, other)
        bound = {"bound": "descriptor-models-user-max", "models": 1, "models_max": 1}
        assert caught.value.data == bound and caught.value.hint
        assert workers(daemon) == 1, "the refused load has started none"
        load_descriptor(bob, other)
        ada.call("unload", graph=graph)
        load_descriptor(ada, other)


def test_a_file_that_a_user_loads_again_shares_its_worker(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    with two_users("descriptor-models-user-max = 1\n") as (daemon, ada, bob):
        loaded = [load_descriptor(ada, path) for _ in range(5)]
        assert len({graph["model"] for graph in loaded}) == 1
        assert len({graph["graph"] for graph in loaded}) == 5
        assert workers(daemon) == 1
        load_descriptor(bob, path)
        assert workers(daemon) == 2, "users do not share one"
        for graph in loaded[1:]:
            ada.call("unload", graph=graph["graph"])
        ada.call("init_execution_context", graph=loaded[0]["graph"])


def test_a_file_is_one_model_under_all_its_names_until_it_changes(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    symbolic, hard, moved = (tmp_path / name for name in ("symbolic", "hard", "moved.gguf"))
    symbolic.symlink_to(path)
    with running_daemon() as daemon, inferd.Client(daemon.socket) as client:
        graphs = [client.load_file(path), client.load_file(symbolic)]
        hard.hardlink_to(path)
        graphs += [client.load_file(hard), client.load_file(f"{tmp_path}/../{tmp_path.name}/hard")]
        path.rename(moved)
        with RawClient(daemon.socket) as another:
            names = {graph.model for graph in graphs} | {load_descriptor(another, moved)["model"]}
            assert len(names) == 1 and workers(daemon) == 1
            moved.write_bytes(moved.read_bytes())
            assert client.load_file(hard).model not in names, "its time has changed"


def test_an_access_rule_forbids_models_from_descriptors(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    rules = f"[access.r]\nusers = [{ADA}]\ndescriptor-models-max = 0\n"
    with two_users(rules) as (_, ada, _), pytest.raises(QuotaExceeded) as caught:
        load_descriptor(ada, path)
    assert caught.value.data["bound"] == "access.r.descriptor-models-max"


def test_loads_of_one_user_are_started_a_few_at_a_time_and_leave_another_user_a_place() -> None:
    models = "".join(echo_model(f"m{number}", load_ms=60_000) for number in range(10))
    with two_users(models + echo_model("victim")) as (daemon, ada, bob):
        numbers = [ada.start_request("load_by_name", name=f"m{n}") for n in range(10)]
        ada.call("models")
        bob.context("victim")
        assert workers(daemon) == 3, "two of hers, and his"
        for number in reversed(numbers):  # first those that wait: they would start in turn
            assert ada.call("cancel", request=number) == {"cancelled": True}


def test_a_load_that_is_cancelled_while_it_waits_starts_no_process() -> None:
    models = "".join(echo_model(f"m{number}", load_ms=60_000) for number in range(3))
    with two_users(models) as (daemon, ada, bob):
        numbers = [ada.start_request("load_by_name", name=f"m{n}") for n in range(3)]
        ada.call("models")
        ada.call("cancel", request=numbers[2])
        states = {m["name"]: (m["state"], m["pid"]) for m in bob.call("models")["models"]}
        assert states["m2"][1] == 0
        assert workers(daemon) <= 2


def test_a_user_who_loads_model_after_model_waits_while_another_users_turn_runs() -> None:
    models = "".join(echo_model(f"m{number}", load_ms=1200) for number in range(3))
    with two_users(models + echo_model("victim")) as (_, ada, bob):
        turn = bob.start_request("stream", context=bob.context("victim"), prompt="x", credit=1)
        for number in [ada.start_request("load_by_name", name=f"m{n}") for n in range(2)]:
            ada.wait_result(number)
        third = ada.start_request("load_by_name", name="m2")
        ada.call("models")
        states = {m["name"]: (m["state"], m["pid"]) for m in ada.call("models")["models"]}
        assert states["m2"] == ("loading", 0), "it waits for a place"
        bob.call("cancel", request=turn)
        ada.wait_result(third)


def sized(name: str, weights: int, load_ms: int = 0) -> str:
    return echo_model(name, load_ms=load_ms, weight_bytes=weights)


MEMORY = "memory-bytes = 1000\n"
LONG_LOADS = "".join(sized(name, 100, load_ms=2000) for name in ("long0", "long1"))
"""Two of them at once use up what a user may load at once, and cause the longest pause."""


def load_long(client: RawClient) -> None:
    for number in [client.start_request("load_by_name", name=f"long{n}") for n in range(2)]:
        client.wait_result(number)


def test_a_paused_load_holds_no_memory() -> None:
    models = LONG_LOADS + sized("big", 600) + sized("other", 600) + sized("victim", 100)
    with two_users(MEMORY + models) as (_, ada, bob):
        ada.call("unload", graph=ada.call("load_by_name", name="big")["graph"])
        turn = bob.start_request("stream", context=bob.context("victim"), prompt="x", credit=1)
        load_long(ada)
        paused = ada.start_request("load_by_name", name="big")
        bob.call("load_by_name", name="other")
        states = {m["name"]: (m["state"], m["pid"]) for m in bob.call("models")["models"]}
        assert states["big"] == ("loading", 0) and states["other"][0] == "ready"
        bob.call("cancel", request=turn)
        ada.wait_result(paused)


def test_a_load_that_has_waited_for_memory_is_paused_as_others_are() -> None:
    models = LONG_LOADS + sized("big", 700) + sized("small", 100) + sized("late", 100)
    models += echo_model("victim", step_ms=30, weight_bytes=500)
    with two_users(MEMORY + models) as (_, ada, bob):
        read = {"prompt": "x" * 1000, "credit": 1024}  # else it would be evicted
        first = bob.start_request("stream", context=bob.context("victim"), **read)
        second = bob.start_request("stream", context=bob.context("small"), prompt="x", credit=1)
        waiting = ada.start_request("load_by_name", name="big")
        load_long(ada)
        bob.call("cancel", request=first)
        bob.call("load_by_name", name="late")
        states = {m["name"]: m["state"] for m in bob.call("models")["models"]}
        assert states["big"] == "loading" and states["victim"] == "ready"
        bob.call("cancel", request=second)
        ada.wait_result(waiting)


def test_a_load_that_stands_still_fails_and_leaves_its_place() -> None:
    config = "[daemon]\nworker-hang-timeout-s = 1\n"
    config += "".join(echo_model(f"m{n}", load_ms=600_000) for n in range(3)) + echo_model("victim")
    with running_daemon(config) as daemon, RawClient(daemon.socket) as client:
        numbers = [client.start_request("load_by_name", name=f"m{n}") for n in range(3)]
        assert client.context("victim"), "it waits for its place"
        for number in numbers:
            with pytest.raises(LoadFailed) as caught:
                client.wait_result(number)
            assert caught.value.data["cause"] == "silent" and caught.value.hint


def test_loads_of_files_that_never_answer_leave_places_for_others() -> None:
    config = "worker-hang-timeout-s = 2\n" + echo_model("victim")
    with two_users(config) as (_, ada, bob), silent_file() as fd:
        attempts = [
            (user, user.start_request("load", [fd], builders=[], fd=0)) for user in (ada, bob)
        ]
        for user, number in attempts:
            with pytest.raises(LoadFailed) as caught:
                user.wait_result(number)
            assert caught.value.data["cause"] == "silent"
        bob.context("victim")


def test_a_passed_file_is_closed_if_its_client_vanishes_while_it_is_read() -> None:
    with daemon_for_all(echo_model("victim")) as daemon:
        with silent_file() as fd:
            path = os.readlink(f"/proc/self/fd/{fd}")
            with client_of(daemon, ADA) as ada:
                ada.start_request("load", [fd], builders=[], fd=0)
                wait_until(lambda: path in paths_open(daemon.pid))
        # Its file system has ended; the path of a file that is still open is now relative to it.
        wait_until(lambda: not any(p.endswith(Path(path).name) for p in paths_open(daemon.pid)), 20)


def paths_open(pid: int) -> list[str]:
    """Return the paths of a process's open files."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(entry))
    return found
