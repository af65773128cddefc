"""Turns that wait, by reason, turns that are left while draining, and times from the request."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

import pytest

from inferd.backends.errors import Cancelled
from inferd.daemon.metrics.collector import WAIT_REASONS, split_by_reason
from inferd.scheduler.record import WaitReason
from inferd.testing import running_daemon
from tests.daemon.metrics.scraping import ScrapedMetrics, scrape_metrics, until
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

TURN = "x" * 900
TWO_MODELS = "[daemon]\nmemory-bytes = 1000\n" + echo_model(
    "a", weight_bytes=600, step_ms=5, slots=1
)
TWO_MODELS += echo_model("b", weight_bytes=600)


def waiting(scraped: ScrapedMetrics, model: str) -> dict[str, int]:
    """Return the waiting and parked turns of *model* by reason, without those that are 0."""
    samples = scraped.families["inferd_num_requests_waiting_by_reason"].samples
    mine = [s for s in samples if s.labels["model_name"] == model]
    return {s.labels["reason"]: int(s.value) for s in mine if s.value}


@pytest.mark.parametrize(
    ("count", "gauges", "found"),
    [
        (0, {}, {}),
        (3, {}, {"slot": 3}),
        (3, {"prefix": 2}, {"prefix": 2, "slot": 1}),
        (3, {"prefix": 2, "disk": 1}, {"prefix": 2, "disk": 1}),
        (1, {"prefix": 2, "disk": 1}, {"prefix": 1}),
        (0, {"reader": 5}, {}),
    ],
)
def test_reasons_never_add_up_to_more_turns_than_wait(
    count: int, gauges: Mapping[str, float], found: dict[str, int]
) -> None:
    page = {f"waiting_{reason}": float(gauges.get(reason, 0)) for reason in WaitReason}
    assert {reason: n for reason, n in split_by_reason(count, page) if n} == found


def test_a_turn_waits_for_a_slot_and_one_parked_by_hand_for_the_others() -> None:
    with running_daemon(TWO_MODELS) as daemon, RawClient(daemon.socket) as client:
        running, late = client.context("a"), client.context("a")
        turns = [client.begin_stream(running, TURN)]
        turns.append(client.start_request("stream", context=late, prompt=TURN, credit=1000))
        scraped = until(daemon, lambda f: waiting(f, "a") == {"slot": 1})
        reasons = scraped.families["inferd_num_requests_waiting_by_reason"].samples
        assert {s.labels["reason"] for s in reasons} == set(WAIT_REASONS)
        # The engine may not have the other turn yet.
        wait_until(lambda: client.call("park", context=running)["parked"])
        until(daemon, lambda f: waiting(f, "a") == {"operator": 1})
        for context, turn in zip((running, late), turns, strict=True):
            client.call("cancel", context=context)
            with pytest.raises(Cancelled):
                client.wait_result(turn)
        until(daemon, lambda f: waiting(f, "a") == {})


def test_a_turn_whose_model_waits_for_memory_waits_for_memory() -> None:
    with running_daemon(TWO_MODELS) as daemon, RawClient(daemon.socket) as client:
        running, late = client.context("a"), client.context("b")
        turn = client.begin_stream(running, TURN)
        waits = client.start_request("chat", context=late, prompt="y", raw=True)
        until(daemon, lambda f: waiting(f, "b") == {"memory": 1})
        client.call("cancel", context=running)
        with pytest.raises(Cancelled):
            client.wait_result(turn)
        client.wait_result(waits)
        scraped = scrape_metrics(daemon)
        labels = {"model_name": "b", "priority": "normal"}
        latency = scraped("e2e_request_latency_seconds_sum", **labels)
        queued = scraped("request_queue_time_seconds_sum", **labels)
        first = scraped("time_to_first_token_seconds_sum", **labels)
        assert latency > first + queued, "with the wait for the model"


def test_a_turn_whose_model_is_being_loaded_waits_for_the_load() -> None:
    with running_daemon(echo_model("m")) as daemon, RawClient(daemon.socket) as client:
        context = client.context("m")
        worker = client.call("show", name="m")["models"][0]["pid"]
        os.kill(worker, signal.SIGSTOP)  # its successor is started once it has exited
        with RawClient(daemon.socket) as operator:
            unload = operator.start_request("unload_model", name="m", force=True)
            until(daemon, lambda f: f("models", state="unloading") == 1)
            waits = client.start_request("chat", context=context, prompt="y", raw=True)
            until(daemon, lambda f: waiting(f, "m") == {"load": 1})
            os.kill(worker, signal.SIGCONT)
            operator.wait_result(unload)
            client.wait_result(waits)


def finishing(scraped: ScrapedMetrics, model: str) -> float:
    """Return the turns of *model* that are left before it or the daemon ends."""
    return scraped("num_requests_finishing", model_name=model)


def test_the_turns_that_a_swap_waits_for_are_counted() -> None:
    with running_daemon(TWO_MODELS) as daemon, RawClient(daemon.socket) as client:
        running = client.context("a")
        turn = client.begin_stream(running, TURN)
        assert finishing(scrape_metrics(daemon), "a") == 0
        with RawClient(daemon.socket) as operator:
            swap = operator.start_request("swap", name="a", to="b", mode="drain")
            until(daemon, lambda f: finishing(f, "a") == 1)
            client.call("cancel", context=running)
            with pytest.raises(Cancelled):
                client.wait_result(turn)
            operator.wait_result(swap)
        assert finishing(scrape_metrics(daemon), "a") == 0


def test_a_drain_is_measured_with_its_turns_that_are_left() -> None:
    with running_daemon(TWO_MODELS) as daemon, RawClient(daemon.socket) as client:
        context = client.context("a")
        client.begin_stream(context, TURN)
        assert scrape_metrics(daemon)("draining_seconds") == 0
        stops = threading.Thread(target=daemon.stop)
        stops.start()
        # The first page with the one may have been begun before the drain: it is read in slices.
        scraped = until(daemon, lambda f: f("draining_seconds") > 0 and finishing(f, "a") == 1)
        assert scraped("draining") == 1
        until(daemon, lambda f: f("draining_seconds") > scraped("draining_seconds"))
        client.start_request("cancel", context=context)
        stops.join()
