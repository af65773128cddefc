"""Scrapes of real daemons: complete, correct, and independent of running work."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferd import Client
from inferd.backends.errors import (
    BackendError,
    Busy,
    Cancelled,
    InferdError,
    InvalidArgument,
    LoadFailed,
    Outcome,
    PromptTooLong,
    Timeout,
)
from inferd.cli.monitoring.stats import MetricSums, acceptance_text
from inferd.daemon.metrics.families import FAMILIES, PREFIX
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.metrics.scraping import ScrapedMetrics, scrape, scrape_metrics, until, where_of
from tests.echo import echo_model
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

CONFIG = """
[daemon]
sessions-max = 6
worker-hang-timeout-s = 600
"""
CONFIG += echo_model("m", slots=2) + echo_model("slow", slots=1, step_ms=5)
CONFIG += '[models.broken]\nfile = "broken.gguf"\n'
LONG: dict[str, Any] = {"prompt": "w" * 1000, "credit": 1000}
"""A turn that takes the slow model five seconds, and is not read."""
SCRAPE_S_MAX = 60.0
"""A scrape that waits for the stopped worker never ends."""
PRIVATE = "id-of-nobody-else"
NORMAL = {"model_name": "slow", "priority": "normal"}


def worker_of(daemon: RunningDaemon, name: str) -> int:
    with RawClient(daemon.socket) as client:
        return int(client.call("show", name=name)["models"][0]["pid"])


def test_every_family_of_the_table_is_there_and_no_other() -> None:
    with running_daemon(CONFIG) as daemon, Client(daemon.socket) as client:
        with client.session("m") as session:
            session.chat("hello")
        scraped = scrape_metrics(daemon)
    ours = {name.removeprefix(PREFIX): f for name, f in scraped.families.items() if PREFIX in name}
    assert set(ours) == set(FAMILIES)
    assert all(n.startswith("process_") for n in set(scraped.families) if PREFIX not in n)
    for name, family in FAMILIES.items():
        kinds = {family.kind}
        assert ours[name].type in kinds, name
        for sample in ours[name].samples:
            assert set(sample.labels) - {"le"} == set(family.labels), name


def test_the_call_returns_all_families_where_no_listener_serves_them() -> None:
    with running_daemon(CONFIG, metrics="off") as daemon, Client(daemon.socket) as client:
        with client.session("m") as session:
            session.chat("hello")
        assert client.stats()["metrics_address"] is None
        called = ScrapedMetrics(client.metrics())
    assert {name.removeprefix(PREFIX) for name in called.families if PREFIX in name} == set(
        FAMILIES
    )
    assert called("time_to_first_token_seconds_count", model_name="m", priority="normal") == 1


def test_a_turn_is_counted_with_its_model_class_times_and_tokens() -> None:
    with running_daemon(CONFIG) as daemon, Client(daemon.socket) as client:
        with client.session("m", raw=True) as session:
            session.chat("hello", priority="high")
            tokens = session.metadata["output_tokens"]
            session.reset()
            session.chat("hello")
        labels = {"model_name": "m", "priority": "high"}
        scraped = until(daemon, lambda f: f("generation_tokens_total", model_name="m") >= tokens)
        for family in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
            assert scraped(f"{family}_seconds_count", **labels) == 1
            assert 0 <= scraped(f"{family}_seconds_sum", **labels) < 20
            assert scraped(f"{family}_seconds_bucket", le="+Inf", **labels) == 1
        assert scraped("request_time_per_output_token_seconds_count", model_name="m") == 2
        reasons = [f for f in scraped.families["inferd_request_success"].samples if f.value]
        assert sum(f.value for f in reasons) == 2
        asked = scraped("prefix_cache_queries_total", model_name="m")
        found = scraped("prefix_cache_hits_total", model_name="m", tier="slot")
        assert found == scraped("prompt_tokens_cached_total", model_name="m") == asked / 2 - 1
        assert scraped("prompt_tokens_total", model_name="m") == asked
        steps = scraped("iteration_tokens_count", model_name="m")
        kinds = ("decode", "mixed", "prefill")
        assert steps > 1
        assert sum(scraped("step_seconds_count", model_name="m", kind=k) for k in kinds) == steps
        assert scraped("slots", model_name="m") == 2
        assert scraped("model_load_seconds_count", model_name="m") == 1


def test_forced_tokens_are_counted() -> None:
    with (
        running_daemon(echo_model("m", forced="=")) as daemon,
        Client(daemon.socket) as client,
        client.session("m", raw=True, options={"grammar": "root ::= .*"}) as session,
    ):
        assert session.chat("ab===c") == "ab===c"
        assert (session.metadata["forced_tokens"], session.metadata["output_tokens"]) == (4, 7)
        found = until(daemon, lambda f: f("generation_tokens_total", model_name="m") == 7)
        assert found("generation_tokens_forced_total", model_name="m") == 4


def test_drafts_are_counted_by_drafter_and_shown() -> None:
    text = "the quick brown fox; the quick brown fox; the quick brown fox; " * 3
    with (
        running_daemon(echo_model("m", step_ms=10, speculation="ngram")) as daemon,
        Client(daemon.socket) as client,
        client.session("m", raw=True) as session,
    ):
        assert session.chat(text) == text
        metadata = session.metadata
        drafted, accepted = metadata["drafted_tokens"], metadata["accepted_tokens"]
        assert drafted >= accepted > len(text) // 2
        labels = {"model_name": "m", "drafter": "ngram"}
        found = until(
            daemon, lambda f: f("spec_decode_num_draft_tokens_total", **labels) == drafted
        )
        assert found("spec_decode_num_accepted_tokens_total", **labels) == accepted
        assert found("spec_decode_num_draft_tokens_total", model_name="m", drafter="mtp") == 0
        session.chat(text, options={"speculation": "off"})
        assert session.metadata["drafted_tokens"] == 0
        sums = MetricSums(client.stats())
        assert acceptance_text(sums) == f"{accepted / drafted:.0%}"
        tokens, seconds, plain = (
            found(f"spec_decode_{name}_total", model_name="m")
            for name in ("tokens", "seconds", "plain_seconds")
        )
        assert accepted < tokens <= len(text) + 1 and 0 < seconds < plain, "it was faster"
        assert client.show("m")["drafts"] == {
            "drafted": drafted,
            "accepted": accepted,
            "tokens": tokens,
            "seconds": pytest.approx(seconds),
            "plain_seconds": pytest.approx(plain),
        }


def test_a_prediction_is_drafted() -> None:
    text = "".join(chr(97 + (n * n * 7 + n // 5) % 26) for n in range(150))
    with (
        running_daemon(echo_model("m", step_ms=10, speculation="ngram")) as daemon,
        Client(daemon.socket) as client,
        client.session("m", raw=True) as session,
    ):
        assert session.chat(text[:20] + "#" + text[21:], options={"prediction": text}) != text
        assert session.metadata["accepted_tokens"] > 20, "the text hardly repeats itself"
        session.chat("x", options={"prediction": "x", "speculation": "off"})
        assert session.metadata["adjusted"]["prediction"] == "speculation is off"
        with pytest.raises(InvalidArgument, match="65536 at most"):
            session.chat("x", options={"prediction": "x" * 65_537})


def test_a_model_that_has_no_drafts_says_so() -> None:
    with (
        running_daemon(echo_model("m", memory="recurrent")) as daemon,
        Client(daemon.socket) as client,
        client.session("m", raw=True) as session,
    ):
        session.chat("hello", options={"speculation": "ngram"})
        assert "to go back to earlier ones" in session.metadata["adjusted"]["speculation"]
        session.chat("hello", options={"speculation": "auto"})
        assert "speculation" not in session.metadata["adjusted"]


def test_running_and_waiting_turns_are_counted_by_class() -> None:
    with running_daemon(CONFIG) as daemon, RawClient(daemon.socket) as client:
        contexts = [client.context("slow") for _ in range(3)]
        for number, (context, priority) in enumerate(
            zip(contexts, ("normal", "low", "low"), strict=True), start=1
        ):
            client.start_request("stream", context=context, priority=priority, **LONG)
            scraped = until(daemon, lambda f, n=number: under_way(f) == n)  # type: ignore[misc]
        assert scraped("num_requests_running", model_name="slow", priority="normal") == 1
        assert scraped("num_requests_waiting", model_name="slow", priority="low") == 2
        reason = {"model_name": "slow", "reason": "slot"}
        assert scraped("num_requests_waiting_by_reason", **reason) == 2
        until(daemon, lambda f: 0 < f("kv_cache_usage_perc", model_name="slow") < 1)
        urgent = client.context("slow")
        other = LONG | {"prompt": "y" * 1000}
        client.start_request("stream", context=urgent, priority="urgent", **other)
        until(daemon, lambda f: f("num_requests_parked", model_name="slow", priority="normal") == 1)
        scraped = until(daemon, lambda f: f("num_preemptions_total", model_name="slow") == 1)
        assert scraped("sessions", state="parked") == 1
        for context in (*contexts, urgent):
            client.call("cancel", context=context)
        scraped = until(daemon, lambda f: under_way(f) == 0)
        errors = {"model_name": "slow", "error": "Cancelled"}
        assert scraped("request_errors_total", **errors) == 4
        assert outcomes_of(scraped, "slow") == {"cancelled": 4}


def under_way(scraped: ScrapedMetrics) -> float:
    names = [f"inferd_num_requests_{state}" for state in ("running", "waiting", "parked")]
    return sum(s.value for name in names for s in scraped.families[name].samples)


def outcomes_of(scraped: ScrapedMetrics, model: str) -> dict[str, float]:
    """Return the requests for turns of *model* by outcome, without those that are 0."""
    samples = scraped.families["inferd_request_outcomes"].samples
    assert {s.labels["outcome"] for s in samples if s.labels["model_name"] == model} == set(Outcome)
    return {
        s.labels["outcome"]: s.value for s in samples if s.labels["model_name"] == model and s.value
    }


def test_only_failures_of_the_service_are_counted_as_failed() -> None:
    config = CONFIG + echo_model("failing", slots=1, fail_at_step=1)
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        with client.session("m") as session:
            session.chat("hello")
            with pytest.raises(InvalidArgument):
                session.chat("hello", options={"temp": -1})
            with pytest.raises(PromptTooLong):
                session.chat("x" * 100_000)
        with client.session("failing") as session, pytest.raises(BackendError):
            session.chat("hello")
        with RawClient(daemon.socket) as raw, pytest.raises(Timeout):
            raw.call("chat", context=raw.context("slow"), prompt="x" * 500, timeout_s=0.01)
        scraped = scrape_metrics(daemon)
    assert outcomes_of(scraped, "m") == {"ok": 1, "refused": 2}
    assert outcomes_of(scraped, "failing") == {"failed": 1}
    assert outcomes_of(scraped, "slow") == {"timeout": 1}
    samples = scraped.families["inferd_call_errors"].samples
    assert {(s.labels["error"], s.labels["outcome"]) for s in samples} == {
        *(("InvalidArgument", "refused"), ("PromptTooLong", "refused")),
        *(("RuntimeError", "failed"), ("Timeout", "timeout")),
    }


def test_a_request_whose_model_cannot_be_loaded_again_has_failed(tmp_path: Path) -> None:
    """No turn begins then, which could be counted when it ends."""
    file = write_tiny("llama", tmp_path)
    config = f'[models.tiny]\nfile = "{file}"\n'
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        with client.session("tiny") as session:
            client.unload_model("tiny", force=True)
            file.write_bytes(b"GGUF and nothing else")
            with pytest.raises(LoadFailed):
                session.chat("hello")
        scraped = scrape_metrics(daemon)
    assert outcomes_of(scraped, "tiny") == {"failed": 1}
    assert scraped("request_errors_total", model_name="tiny", error="LoadFailed") == 1


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_that_waits_for_its_model_can_be_cancelled_and_is_no_failure(
    leaves: bool,
) -> None:
    config = "[daemon]\nmemory-bytes = 1000\n" + echo_model("a", weight_bytes=600, step_ms=5)
    config += echo_model("b", weight_bytes=600)
    with running_daemon(config) as daemon, RawClient(daemon.socket) as client:
        with RawClient(daemon.socket) as other:
            running, late = client.context("a"), other.context("b")
            turn = client.begin_stream(running, "x" * 1000)
            waits = other.start_request("chat", context=late, prompt="y")
            until(
                daemon, lambda f: f("num_requests_waiting", model_name="b", priority="normal") == 1
            )
            if not leaves:
                other.call("cancel", context=late)
                with pytest.raises(Cancelled):
                    other.wait_result(waits)
        scraped = until(daemon, lambda f: outcomes_of(f, "b") != {})
        assert outcomes_of(scraped, "b") == {"cancelled": 1}
        client.call("cancel", context=running)
        with pytest.raises(Cancelled):
            client.wait_result(turn)


def test_refusals_are_counted_by_the_full_bound() -> None:
    with running_daemon(CONFIG) as daemon, Client(daemon.socket) as client:
        with pytest.raises(InferdError):
            client.load_by_name("no such model")
        sessions = [client.session("m") for _ in range(7)]
        with pytest.raises(Busy):
            for session in sessions:
                session.__enter__()
        scraped = scrape_metrics(daemon)
        assert scraped("sessions_refused_total") == 1
        assert scraped("admission_rejections_total", reason="sessions-max") == 1
        assert scraped("admission_rejections_total", reason="tasks-waiting-max") == 0
        refused = {"call": "load_by_name", "error": "ModelNotFound", "outcome": "refused"}
        assert scraped("call_errors_total", **refused) == 1
        assert sum(s.value for s in scraped.families["inferd_sessions"].samples) == 6
        assert scraped("sessions_max") == 6


def test_a_queue_that_is_full_is_a_rejection_and_when_there_was_room_is_measured() -> None:
    config = CONFIG.replace("sessions-max = 6", "tasks-waiting-user-max = 1")
    with running_daemon(config) as daemon, RawClient(daemon.socket) as client:
        running, waiting, third = (client.context("slow") for _ in range(3))
        long = {"prompt": "z" * 400, "priority": "high", "credit": 1000}
        client.start_request("stream", context=running, **long)
        until(daemon, lambda f: f("num_requests_running", model_name="slow", priority="high") == 1)
        client.start_request("stream", context=waiting, prompt="z")
        until(daemon, lambda f: f("num_requests_waiting", **NORMAL) == 1)
        with pytest.raises(Busy):
            client.call("stream", context=third, prompt="too many")
        reason = "tasks-waiting-user-max"
        assert scrape_metrics(daemon)("admission_rejections_total", reason=reason) == 1
        scraped = until(daemon, lambda f: f("retry_after_ratio_count") == 1)
        assert scraped("retry_after_ratio_sum") > 0


def test_forks_and_models_and_parts_are_counted() -> None:
    with running_daemon(CONFIG) as daemon, RawClient(daemon.socket) as client:
        (daemon.directory / "models" / "broken.gguf").write_bytes(b"GGUF and nothing else")
        context = client.context("m")
        client.call("chat", context=context, prompt="x")
        client.call("fork_session", context=context, n=2)
        with pytest.raises(InferdError):
            client.context("broken")
        scraped = until(daemon, lambda f: f("model_load_failures_total", model_name="broken") == 1)
        assert scraped("session_forks_total") == 2
        assert scraped("models", state="ready") == 1
        assert scraped("models", state="failed") == 1
        assert scraped("models", state="cold") == 2
        assert scraped("component_up", component="journal") == 1
        assert scraped("component_up", component="metrics") == 1
        restarts = scrape_metrics(daemon).families["inferd_worker_restarts"].samples
        assert [(s.labels["model_name"], s.value) for s in restarts] == [("m", 0), ("broken", 0)]
        assert scraped.families["process_resident_memory_bytes"].samples[0].value > 1e6


def test_a_worker_that_dies_is_counted_and_no_counter_goes_back() -> None:
    with running_daemon(CONFIG) as daemon, Client(daemon.socket) as client:
        with client.session("m", raw=True) as session:
            session.chat("hello " * 20)
            before = until(daemon, lambda f: f("generation_tokens_total", model_name="m") > 100)
            os.kill(worker_of(daemon, "m"), signal.SIGKILL)
            died = until(daemon, lambda f: f("worker_restarts_total", model_name="m") == 1)
            session.chat("again " * 20)
        after = until(
            daemon,
            lambda f: (
                f("generation_tokens_total", model_name="m")
                > before("generation_tokens_total", model_name="m") + 100
            ),
        )
        for scraped, earlier in ((died, before), (after, died)):
            assert not decreased(earlier, scraped)
        assert after("model_unloads_total", model_name="m") == 0


def decreased(before: ScrapedMetrics, after: ScrapedMetrics) -> list[str]:
    """Return the samples of counters and histograms that have decreased."""
    return [
        sample.name
        for family in before.families.values()
        if family.type in ("counter", "histogram") and family.name.startswith(PREFIX)
        for sample in family.samples
        if after(sample.name.removeprefix(PREFIX), **sample.labels) < sample.value
    ]


def test_a_swap_keeps_the_metrics_of_the_name() -> None:
    with running_daemon(CONFIG) as daemon, Client(daemon.socket) as client:
        with client.session("m", raw=True) as session:
            session.chat("hello " * 20)
            before = until(daemon, lambda f: f("generation_tokens_total", model_name="m") > 100)
            client.swap("m", to="slow")
            session.chat("more")
        after = until(daemon, lambda f: f("model_unloads_total", model_name="m") == 1)
        assert not decreased(before, after)
        assert after("model_swap_seconds_count", mode="migrate") == 1
        assert "swap)" not in after.text


def test_no_label_holds_a_user_a_session_or_a_text() -> None:
    with running_daemon(CONFIG) as daemon, Client(daemon.socket) as client:
        with client.session("m", session_id=PRIVATE) as session:
            session.chat("my secret")
            handle = session.context
        text = scrape(where_of(daemon))
    for private in (PRIVATE, "secret", str(handle), "uid", daemon.socket):
        assert private not in text


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, until the end of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_scrape_waits_for_no_worker() -> None:
    with running_daemon(CONFIG) as daemon, RawClient(daemon.socket) as client:
        context = client.context("slow")
        client.start_request("stream", context=context, **LONG)
        until(daemon, lambda f: f("generation_tokens_total", model_name="slow") > 0)
        with stopped(worker_of(daemon, "slow")):
            began = time.monotonic()
            scraped = scrape_metrics(daemon)
            assert time.monotonic() - began < SCRAPE_S_MAX
            assert scraped("generation_tokens_total", model_name="slow") > 0
            assert scraped("num_requests_running", model_name="slow", priority="normal") == 1
            assert scraped("models", state="ready") == 1
            silent = scraped("worker_unresponsive_seconds", model_name="slow")
            later = until(
                daemon, lambda f: f("worker_unresponsive_seconds", model_name="slow") > silent + 0.2
            )
            same = "generation_tokens_total"
            assert later(same, model_name="slow") == scrape_metrics(daemon)(same, model_name="slow")


def test_a_scrape_loads_no_model_and_delays_no_unload() -> None:
    config = CONFIG.replace("[models.m]", "keep-alive-s = 0.3\n[models.m]")
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        scraped = scrape_metrics(daemon)
        assert scraped("models", state="cold") == scraped("models", state="cold") == 4
        with client.session("m") as session:
            session.chat("hello")
        client.close()
        scraped = until(daemon, lambda f: f("model_unloads_total", model_name="m") == 1)
        until(daemon, lambda f: f("models", state="cold") == 4)
        assert "model.loading" in daemon.log and daemon.log.count("model.loading") == 1


def test_a_scrape_keeps_no_session_from_expiring() -> None:
    config = CONFIG.replace("[models.m]", "idle-timeout-ms = 300\n[models.m]")
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        with client.session("m"):
            until(daemon, lambda f: f("sessions_expired_total") == 1)
        assert scrape_metrics(daemon)("sessions_expired_total") == 1


def test_the_journals_lag_is_reported_while_it_cannot_be_written() -> None:
    with (
        running_daemon(CONFIG) as daemon,
        Client(daemon.socket) as client,
        client.session("m", session_id="diary") as session,
    ):
        session.chat("hello")
        assert until(daemon, lambda f: f("journal_lag_seconds") == 0)
        path = daemon.directory / "state" / "sessions.db"
        size = path.stat().st_size
        psutil.Process(daemon.pid).rlimit(psutil.RLIMIT_FSIZE, (size // 2, -1))
        session.chat("the disk is full")
        scraped = until(daemon, lambda f: f("journal_lag_seconds") > 0.3)
        assert scraped("component_up", component="journal") == 0
        psutil.Process(daemon.pid).rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
        until(daemon, lambda f: f("journal_lag_seconds") == 0)
        until(daemon, lambda f: f("component_up", component="journal") == 1)


def test_streams_go_on_under_a_storm_of_scrapes() -> None:
    with running_daemon(CONFIG) as daemon, Client(daemon.socket) as client:
        over = threading.Event()
        done = [0]

        def storm() -> None:
            while not over.is_set():
                scrape(where_of(daemon))
                done[0] += 1

        threads = [threading.Thread(target=storm) for _ in range(4)]
        for thread in threads:
            thread.start()
        with client.session("m", raw=True) as session:
            text = "not a character is lost " * 40
            assert session.chat(text) == text
        over.set()
        for thread in threads:
            thread.join()
        assert done[0] > 4


def test_a_turn_that_is_cancelled_before_it_had_a_slot_has_no_queue_time() -> None:
    with running_daemon(CONFIG) as daemon, RawClient(daemon.socket) as client:
        first, second = client.context("slow"), client.context("slow")
        long = LONG | {"prompt": "v" * 1000}
        client.start_request("stream", context=first, priority="high", **long)
        until(daemon, lambda f: f("num_requests_running", model_name="slow", priority="high") == 1)
        client.start_request("stream", context=second, prompt="v", priority="low")
        until(daemon, lambda f: f("num_requests_waiting", model_name="slow", priority="low") == 1)
        client.call("cancel", context=second)
        scraped = until(
            daemon,
            lambda f: f("request_errors_total", model_name="slow", error=Cancelled.name) == 1,
        )
        labels = {"model_name": "slow", "priority": "low"}
        assert scraped("request_queue_time_seconds_count", **labels) == 0
        assert scraped("e2e_request_latency_seconds_count", **labels) == 0


def test_stats_and_status_show_the_metrics_address() -> None:
    with running_daemon(CONFIG, metrics="127.0.0.1:0") as daemon, Client(daemon.socket) as client:
        where = client.stats()["metrics_address"]
        assert where and where.startswith("127.0.0.1:") and not where.endswith(":0")
        assert "inferd_build_info{" in scrape(where)
    with running_daemon(CONFIG, metrics="off") as daemon, Client(daemon.socket) as client:
        assert client.stats()["metrics_address"] is None
        down = [part["component"] for part in client.stats()["components"] if not part["up"]]
        assert down == ["model-files"], "the file of a model in the configuration is missing"
        assert not Path(where_of(daemon)).exists()


def test_the_name_of_a_model_loaded_by_descriptor_is_not_exposed(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    with (
        running_daemon(CONFIG) as daemon,
        Client(daemon.socket) as client,
        path.open("rb") as file,
    ):
        client.load(fd=file.fileno())
        names = [model["name"] for model in client.models() if model["state"] == "ready"]
        scraped = until(
            daemon, lambda f: f("model_load_seconds_count", model_name="descriptor") == 1
        )
        assert scraped("slots", model_name="descriptor") > 0
        assert len(names) == 1 and names[0] not in scraped.text
