"""Memory of real processes: evictions, smaller shapes, refusals, and keep-alive."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import psutil
import pytest

from inferd.backends.errors import (
    LoadFailed,
    OutOfMemory,
    PermissionDenied,
)
from inferd.daemon.config.settings import Config
from inferd.daemon.core import Daemon
from inferd.ipc.messages import CALLS, NameParams
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.daemon.other_users import Stranger
from tests.models import ONE_THREAD, gemma3, smollm2
from tests.raw import RawClient
from tests.sparse_gguf import WEIGHT_BYTES_MIN, write_sparse
from tests.tiny_gguf import write_split, write_tiny
from tests.waiting import wait_until

BUDGET = 1000


def echo(name: str, weights: int, *, token_bytes: int = 0, load_ms: int = 0, **keys: Any) -> str:
    """Return the configuration of a model that says it needs *weights* bytes."""
    lines = [f"{key} = {value}" for key, value in keys.items()]
    return "\n".join(
        [
            f"[models.{name}]",
            'backend = "echo"',
            *lines,
            f"[models.{name}.echo]",
            f"weight_bytes = {weights}",
            f"token_bytes = {token_bytes}",
            f"load_ms = {load_ms}",
            "",
        ]
    )


def daemon_with(*models: str, **settings: Any) -> RunningDaemon:
    keys = {"memory_bytes": BUDGET, **settings}
    lines = [f"{key.replace('_', '-')} = {value}" for key, value in keys.items()]
    return running_daemon("\n".join(["[daemon]", *lines, "", *models]))


def load(client: RawClient, name: str, config: str = "") -> dict[str, Any]:
    result: dict[str, Any] = client.call("load_by_name_with_config", name=name, config=config)
    return result


def load_and_leave(client: RawClient, name: str, config: str = "") -> None:
    """Load a model and end the lease: the model stays loaded and idle."""
    client.call("unload", graph=load(client, name, config)["graph"], keep=True)


def model(client: RawClient, name: str) -> dict[str, Any]:
    (found,) = client.call("show", name=name)["models"]
    return dict(found)


def states(client: RawClient) -> dict[str, str]:
    return {m["name"]: m["state"] for m in client.call("models")["models"]}


# Eviction.


def test_an_idle_model_is_evicted_for_one_that_needs_its_memory() -> None:
    with daemon_with(echo("a", 700), echo("b", 600)) as daemon, RawClient(daemon.socket) as client:
        load_and_leave(client, "a")
        assert states(client)["a"] == "ready"

        load(client, "b")

        assert states(client) | {"echo": ""} == {"a": "cold", "b": "ready", "echo": ""}
        assert "model.evicted" in daemon.log


def test_a_model_that_fits_beside_the_others_evicts_none() -> None:
    with daemon_with(echo("a", 500), echo("b", 500)) as daemon, RawClient(daemon.socket) as client:
        load_and_leave(client, "a")
        load(client, "b")

        assert states(client)["a"] == states(client)["b"] == "ready"


def test_the_model_that_loads_faster_is_evicted() -> None:
    models = (echo("quick", 400), echo("slow", 400, load_ms=2000), echo("new", 500))
    with daemon_with(*models) as daemon, RawClient(daemon.socket) as client:
        slow = load(client, "slow")["graph"]
        load_and_leave(client, "quick")
        client.call("unload", graph=slow, keep=True)
        load(client, "new")

        assert states(client) | {"echo": ""} == {
            "quick": "cold",
            "slow": "ready",
            "new": "ready",
            "echo": "",
        }


def test_a_model_without_memory_beside_a_pinned_one_is_refused_with_its_name() -> None:
    with daemon_with(echo("a", 700), echo("b", 600)) as daemon, RawClient(daemon.socket) as client:
        load(client, "a")
        client.call("pin", name="a")

        with pytest.raises(OutOfMemory) as caught:
            load(client, "b")

        error = caught.value
        assert (error.data["needed_bytes"], error.data["free_bytes"]) == (600, 300)
        assert "600 B" in error.message and "300 B are free" in error.message
        assert "unload a (700 B)" in error.hint
        assert states(client)["a"] == "ready"
        assert model(client, "b")["error"]["name"] == "MissingMemory"


def test_no_model_is_evicted_for_one_that_can_never_fit() -> None:
    with daemon_with(echo("a", 700), echo("b", 1001)) as daemon, RawClient(daemon.socket) as client:
        load_and_leave(client, "a")

        with pytest.raises(OutOfMemory) as caught:
            load(client, "b")

        assert caught.value.data["free_bytes"] == BUDGET
        assert "are free of the 1 kB that memory-bytes allows" in caught.value.message
        assert caught.value.hint.startswith("raise memory-bytes")
        assert states(client)["a"] == "ready"


def test_a_refused_load_succeeds_once_memory_is_free() -> None:
    with daemon_with(echo("a", 700), echo("b", 600)) as daemon, RawClient(daemon.socket) as client:
        load(client, "a")
        client.call("pin", name="a")
        with pytest.raises(OutOfMemory):
            load(client, "b")
        client.call("unpin", name="a")

        assert load(client, "b")["model"] == "b"


def test_a_session_of_an_evicted_model_continues_when_it_is_loaded_again() -> None:
    with daemon_with(echo("a", 700), echo("b", 600)) as daemon, RawClient(daemon.socket) as client:
        with RawClient(daemon.socket) as other:
            graph = load(other, "a")["graph"]
            context = other.call(
                "init_execution_context_with_session_id", graph=graph, session_id="s"
            )["context"]
            other.call("chat", context=context, prompt="one")
        graph = load(client, "b")["graph"]
        client.call("unload", graph=graph)

        graph = load(client, "a")["graph"]
        opened = client.call("init_execution_context_with_session_id", graph=graph, session_id="s")
        assert opened["attached"]
        assert client.call("chat", context=opened["context"], prompt="two")["text"] == b"two"


# Two at once.


def test_two_loads_at_once_do_not_get_the_same_bytes() -> None:
    models = (echo("a", 600, load_ms=200), echo("b", 600, load_ms=200))
    with daemon_with(*models) as daemon, RawClient(daemon.socket) as client:
        numbers = [client.start_request("load_by_name", name=name) for name in ("a", "b")]
        seen: list[dict[str, str]] = []
        while not all(client.has_answer(number) for number in numbers):
            seen.append(states(client))
        assert [client.wait_result(number)["model"] for number in numbers] == ["a", "b"]
        assert {"a": "ready", "b": "ready", "echo": "cold"} not in seen
        assert daemon.log.count("model.evicted") == 1


def test_a_load_that_waits_for_memory_delays_neither_turns_nor_a_load_that_fits() -> None:
    """`leaving` does not end before it may: until then `waits` has no memory."""
    models = (echo("leaving", 700), echo("waits", 800), echo("small", 100), echo("loaded", 0))
    with daemon_with(*models) as daemon, RawClient(daemon.socket) as client:
        loaded = client.context("loaded")
        load_and_leave(client, "leaving")
        worker = psutil.Process(model(client, "leaving")["pid"])
        worker.suspend()
        try:
            waits = client.start_request("load_by_name", name="waits")
            wait_until(lambda: model(client, "leaving")["state"] == "unloading")

            assert client.call("chat", context=loaded, prompt="now", raw=True)["text"] == b"now"
            assert load(client, "small")["model"] == "small"
            assert states(client)["leaving"] == "unloading" and states(client)["waits"] == "loading"
        finally:
            worker.resume()
        assert client.wait_result(waits)["model"] == "waits"


def test_memory_for_a_waiting_load_is_not_reserved_for_another() -> None:
    models = (echo("leaving", 700), echo("waits", 800), echo("late", 250))
    with daemon_with(*models) as daemon, RawClient(daemon.socket) as client:
        load_and_leave(client, "leaving")
        worker = psutil.Process(model(client, "leaving")["pid"])
        worker.suspend()
        try:
            waits = client.start_request("load_by_name", name="waits")
            wait_until(lambda: model(client, "leaving")["state"] == "unloading")
            late = client.start_request("load_by_name", name="late")
            wait_until(lambda: model(client, "late")["pid"] != 0)
        finally:
            worker.resume()
        assert client.wait_result(waits)["model"] == "waits"
        assert client.wait_result(late)["model"] == "late"
        loaded = [line for line in daemon.log.splitlines() if "model.loaded" in line]
        assert ["waits" in line for line in loaded] == [False, True, False], daemon.log


def test_without_a_limit_no_more_is_reserved_than_the_machine_has() -> None:
    """Each needs three fifths of what is free now and takes nothing of it."""
    token_bytes = psutil.virtual_memory().available * 3 // 5 // 1024
    keys = {"ctx-size": 1024, "slots": 1}
    models = [echo(name, 0, token_bytes=token_bytes, **keys) for name in ("a", "b")]
    with daemon_with(*models, memory_bytes=0) as daemon, RawClient(daemon.socket) as client:
        graph = load(client, "a")["graph"]
        client.call("pin", name="a")
        with pytest.raises(OutOfMemory) as caught:
            load(client, "b")
        assert caught.value.data["needed_bytes"] == token_bytes * 1024
        assert caught.value.data["free_bytes"] < token_bytes * 1024
        client.call("unpin", name="a")
        client.call("unload", graph=graph, keep=True)

        assert load(client, "b")["model"] == "b"
        assert states(client)["a"] == "cold"


# Fitting.


def test_defaults_shrink_until_the_model_fits_and_the_result_has_them() -> None:
    config = echo("a", 0, token_bytes=1)
    with (
        daemon_with(config, memory_bytes=3000) as daemon,
        RawClient(daemon.socket) as client,
    ):
        result = load(client, "a")

        assert (result["slots"], result["ctx_size"]) == (1, 2048)
        assert result["not_applied"] == {"slots": 1, "ctx-size": 2048}
        found = model(client, "a")
        assert found["memory"]["total"] == found["memory"]["context"] == 2048
        context = client.call("init_execution_context", graph=result["graph"])["context"]
        assert client.metadata(context)["not_applied"] == {"slots": 1, "ctx-size": 2048}


@pytest.mark.parametrize(
    ("keys", "config"),
    [({"ctx-size": 4096, "slots": 1}, ""), ({"slots": 1}, '{"ctx-size": 4096}')],
)
def test_a_requested_context_does_not_shrink(keys: dict[str, int], config: str) -> None:
    with (
        daemon_with(echo("a", 0, token_bytes=1, **keys), memory_bytes=3000) as daemon,
        RawClient(daemon.socket) as client,
    ):
        with pytest.raises(OutOfMemory) as caught:
            load(client, "a", config)

        assert caught.value.data["needed_bytes"] == 4096
        assert "smaller ctx-size than 4096" in caught.value.hint


def test_a_model_refused_with_a_large_context_is_loaded_with_a_small_one() -> None:
    with (
        daemon_with(echo("a", 0, token_bytes=1), memory_bytes=3000) as daemon,
        RawClient(daemon.socket) as client,
    ):
        for _ in range(2):
            with pytest.raises(OutOfMemory):
                load(client, "a", '{"ctx-size": 10000}')
        assert load(client, "a", '{"ctx-size": 1000}')["ctx_size"] == 1000


def test_a_smaller_requested_context_is_the_minimum() -> None:
    with (
        daemon_with(echo("a", 0, token_bytes=1), memory_bytes=3500) as daemon,
        RawClient(daemon.socket) as client,
    ):
        result = load(client, "a", '{"ctx-size": 3000}')

        assert result["ctx_size"] == 3000
        assert result["not_applied"] == {"slots": 1}


# Keeping.


def test_keep_alive_holds_per_model_and_per_request() -> None:
    models = (echo("gone", 0, **{"keep-alive": 0}), echo("kept", 0, **{"keep-alive": -1}))
    with daemon_with(*models, keep_alive_s=100) as daemon, RawClient(daemon.socket) as client:
        load_and_leave(client, "kept")
        load_and_leave(client, "echo")
        load_and_leave(client, "gone")
        assert model(client, "kept")["expires_s"] is None
        assert model(client, "kept")["keep_alive_s"] == -1
        assert 90 < model(client, "echo")["expires_s"] <= 100
        wait_until(lambda: model(client, "gone")["state"] == "cold")

        load_and_leave(client, "echo", '{"keep_alive": 7}')
        assert 0 < model(client, "echo")["expires_s"] <= 7
        assert load(client, "echo", '{"keep_alive": 7}').get("not_applied") is None
        load_and_leave(client, "kept", '{"keep-alive": 0}')
        wait_until(lambda: model(client, "kept")["state"] == "cold")


def test_a_pinned_model_neither_expires_nor_is_evicted() -> None:
    with (
        daemon_with(echo("a", 700), echo("b", 600), keep_alive_s=0) as daemon,
        RawClient(daemon.socket) as client,
    ):
        client.call("pin", name="a")
        client.call("unload", graph=load(client, "a")["graph"])
        with pytest.raises(OutOfMemory):
            load(client, "b")
        found = model(client, "a")
        assert (found["state"], found["pinned"], found["expires_s"]) == ("ready", True, None)

        client.call("unpin", name="a")
        wait_until(lambda: model(client, "a")["state"] == "cold")
        assert load(client, "b")["model"] == "b"


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["pin", "unpin"])
async def test_only_an_operator_pins(call: str, tmp_path: Path) -> None:
    """Asked without a socket: these tests run as one user."""
    somebody = Stranger(os.getuid() + 1)
    config = Config(
        socket=tmp_path / "s", models_dir=tmp_path, state_dir=tmp_path, cores=1, kv_ram_bytes=0
    )
    async with anyio.create_task_group() as group:
        daemon = Daemon(config, group, 1)
        request: Any = SimpleNamespace(
            row=CALLS[call],
            call=call,
            number=1,
            params=NameParams(name="echo"),
            connection=somebody,
        )
        with pytest.raises(PermissionDenied):
            await daemon.run_call(request)


def test_the_command_line_pins_and_keeps_alive() -> None:
    with daemon_with(echo("a", 1)) as daemon:
        socket = daemon.socket
        loaded = document(inferd("load", "a", "--keep-alive", "1000", "--json", socket=socket))
        assert loaded["model"] == "a" and loaded["not_applied"] == {}
        [found] = document(inferd("ps", "--json", socket=socket))["models"]
        assert 900 < found["expires_s"] <= 1000
        assert "17 min" in inferd("ps", socket=socket).stdout
        assert inferd("pin", "a", socket=socket).exit_code == 0
        assert "pinned" in inferd("ps", socket=socket).stdout
        assert document(inferd("unpin", "a", "--json", socket=socket)) == {"unpinned": "a"}
        assert "pinned" not in inferd("ps", socket=socket).stdout
        assert inferd("pin", "none", socket=socket).exit_code == 1


# Failed loads.


def test_a_failed_load_is_answered_at_once_until_the_file_changes() -> None:
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        file = daemon.directory / "models" / "m.gguf"
        file.write_bytes(b"no model")
        with pytest.raises(LoadFailed, match="is not a GGUF file"):
            load(client, "m")
        with pytest.raises(LoadFailed, match="is not a GGUF file") as caught:
            load(client, "m")
        assert daemon.log.count("model.loading") == 1, "no process was started for it again"
        assert caught.value.data["failed_s_ago"] >= 0 and caught.value.hint

        write_tiny("llama", file.parent).rename(file)
        assert load(client, "m")["model"] == "m"


def test_each_reason_has_its_words() -> None:
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        models = daemon.directory / "models"
        whole = write_tiny("llama", models)
        (models / "cut.gguf").write_bytes(whole.read_bytes()[:50_000])
        (models / "gone.gguf").symlink_to(models / "nowhere")
        write_tiny("unheard-of", models)
        for name, error, words in (
            ("cut", LoadFailed, "cut off"),
            ("gone", LoadFailed, "No such file"),
            ("tiny-unheard-of", LoadFailed, "unknown model architecture"),
        ):
            for _ in range(2):
                with pytest.raises(error, match=words) as caught:
                    load(client, name)
                assert caught.value.hint
            assert model(client, name)["error"]["name"] == error.name


def test_a_load_that_cannot_allocate_reports_the_sizes(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    config = "[daemon]\nmemory-bytes = 1_000_000_000_000_000\n[models.tiny-llama]\n"
    config += "slots = 4\nctx-size = 2_000_000\n"
    with running_daemon(config, models_dir=tmp_path) as daemon, RawClient(daemon.socket) as client:
        resource.prlimit(daemon.pid, resource.RLIMIT_AS, (2 << 30, 2 << 30))  # of workers, too
        with pytest.raises(OutOfMemory) as caught:
            load(client, "tiny-llama")
        data = caught.value.data
        assert data["needed_bytes"] > 2 << 30 and 0 < data["free_bytes"] < 1 << 40
        assert (data["slots"], data["ctx_size"]) == (4, 2_000_000)
        assert "ctx-size" in caught.value.hint and "slots of 2000000" in caught.value.message
        assert "limited to 2.15 GB (ulimit -v)" in caught.value.message
        assert "ulimit -v" in caught.value.hint
        # A swap asks whether the model would fit in the place of the old one.
        client.call("load_by_name", name="echo")
        with pytest.raises(OutOfMemory):
            client.call("swap", name="echo", to="tiny-llama")
        assert model(client, "echo")["state"] == "ready"


# Split models and large ones.


def test_a_split_model_is_one_model(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    assert len(parts) == 3
    with running_daemon(models_dir=tmp_path) as daemon, RawClient(daemon.socket) as client:
        assert states(client) == {"echo": "cold", "tiny": "cold"}
        assert model(client, "tiny")["size_bytes"] == sum(p.stat().st_size for p in parts)
        context = client.context("tiny")
        client.call("chat", context=context, prompt="x", options={"n-predict": 3})
        assert client.metadata(context)["output_tokens"] == 3


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    part = write_split(tmp_path)[missing]
    part.unlink()
    with running_daemon(models_dir=tmp_path) as daemon, RawClient(daemon.socket) as client:
        with pytest.raises(LoadFailed) as caught:
            load(client, "tiny")
        assert part.name in caught.value.message


def test_a_model_larger_than_the_memory_is_refused_before_anything_is_allocated(
    tmp_path: Path,
) -> None:
    write_sparse(tmp_path / "large.gguf")
    config = f"[daemon]\nmemory-bytes = {4 << 30}\n"
    with (
        running_daemon(config, models_dir=tmp_path) as daemon,
        RawClient(daemon.socket) as client,
    ):
        children = psutil.Process(daemon.pid).children
        with pytest.raises(OutOfMemory) as caught:
            load(client, "large")
        error = caught.value
        assert error.data["needed_bytes"] > WEIGHT_BYTES_MIN
        assert error.data["free_bytes"] == 4 << 30
        assert "GB of memory" in error.message and "4.29 GB are free" in error.message
        assert "smaller model" in error.hint
        with pytest.raises(OutOfMemory, match="ago"):
            load(client, "large")
        assert all(p.memory_info().rss < 200e6 for p in children())


def test_a_split_model_is_removed_whole(tmp_path: Path) -> None:
    parts = write_split(tmp_path, "split")
    write_split(tmp_path, "split-other")
    done = inferd(
        "rm", "split", "--yes", "--models-dir", str(tmp_path), socket=str(tmp_path / "no")
    )
    assert done.exit_code == 0
    assert not [part for part in parts if part.exists()]
    assert len(list(tmp_path.glob("split-other-*"))) == 3


REAL = f"""
[daemon]
memory-bytes = 700_000_000
kv-ram-bytes = 1
[models.smollm2]
file = "{smollm2()}"
ctx-size = 256
slots = 16
[models.gemma3]
file = "{gemma3()}"
ctx-size = 512
slots = 4
"""
"""Short contexts are soon full. Those of SmolLM2 take a third of its memory nevertheless."""


def settled(name: str, ctx_size: int, client: RawClient) -> tuple[int, int]:
    """Fill a context nearly; return the model's estimated and resident bytes.

    A turn with a grammar waits for the thread that reads the vocabulary, which takes memory, too.
    With logprobs of the prompt, a step has as many logits as it can have.
    """
    context = client.context(name)
    client.set_input(context, b'{"regex": "x", "prompt-logprobs": 1}', index=1)
    client.set_input(context, b"one two three four five six seven " * (ctx_size * 14 // 15 // 7))
    client.call("compute", context=context, timeout_s=150)
    found = model(client, name)
    return found["memory"]["total"], psutil.Process(found["pid"]).memory_info().rss


@pytest.mark.model
@pytest.mark.timeout(400)
def test_a_real_model_is_evicted_for_another_and_each_takes_its_estimate() -> None:
    """700 MB are enough for either, and not for both. A slow machine computes small batches, which
    use less memory than full ones of the usual size.
    """
    with running_daemon(REAL + ONE_THREAD + "n-predict = 1\nbatch-size = 64\n") as daemon:
        for name, others, ctx_size in (("smollm2", "gemma3", 256), ("gemma3", "smollm2", 512)):
            with RawClient(daemon.socket, timeout_s=200) as client:
                estimate, resident = settled(name, ctx_size, client)
                sys.stderr.write(
                    f"{name}: estimated {estimate / 1e6:.1f}, has {resident / 1e6:.1f} MB\n"
                )
                assert estimate == pytest.approx(resident, rel=0.05)
                assert model(client, others)["state"] == "cold"
