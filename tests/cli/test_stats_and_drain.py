"""`inferd stats` and `inferd drain`."""

from __future__ import annotations

from typing import Any

from inferd.cli.monitoring.stats import MetricSums, sections
from inferd.testing import running_daemon
from tests.daemon.command_line import document, inferd, inferd_process
from tests.daemon.metrics.scraping import scrape_metrics, until
from tests.raw import RawClient

SLOW = """
[models.slow]
backend = "echo"
[models.slow.echo]
step_ms = 20
"""
LONG = "BEGIN " + "and so on " * 300


def one(value: float, **labels: str) -> dict[str, Any]:
    return {**labels, "value": value}


STATS = {
    "prompt_tokens": [one(100, model_name="a"), one(30, model_name="b")],
    "prompt_tokens_cached": [one(60, model_name="a")],
    "num_requests_running": [
        one(2, model_name="a", priority="low"),
        one(1, model_name="b", priority="low"),
    ],
    "prefix_cache_queries": [one(130, model_name="a")],
    "prefix_cache_hits": [
        one(40, model_name="a", tier="slot"),
        one(12, model_name="a", tier="memory"),
        one(0, model_name="a", tier="disk"),
    ],
    "kv_bytes": [one(3e6, model_name="a", tier="slots"), one(5e8, model_name="", tier="disk")],
    "kv_bytes_max": [one(1e10, tier="disk")],
    "admission_rejections": [one(0, reason="memory"), one(7, reason="sessions-max")],
    "request_success": [one(4, model_name="a", finished_reason="eos")],
    "request_errors": [one(9, model_name="a", error="Cancelled")],
    "request_outcomes": [
        one(9, model_name="a", outcome="cancelled"),
        one(2, model_name="a", outcome="failed"),
    ],
    "sessions": [one(3, state="running"), one(0, state="done")],
    "sessions_max": [one(100)],
}


def test_metrics_are_summed_by_their_labels() -> None:
    figures = MetricSums({"metrics": STATS})
    assert figures.total("prompt_tokens") == 130
    assert figures.total("prompt_tokens", model_name="b") == 30
    assert figures.by("num_requests_running", "priority") == {"low": 3}
    assert figures.by("prefix_cache_hits", "tier", model_name="b") == {}
    assert MetricSums({}).total("prompt_tokens") == 0, "an older daemon has no figures"


def test_the_tables_show_the_metrics() -> None:
    tables = {heads[0]: (heads, rows) for heads, rows in sections(MetricSums({"metrics": STATS}))}
    heads, [a, b] = tables["MODEL"]
    assert dict(zip(heads, a, strict=True)) == {
        "MODEL": "a", "PROMPT TOKENS": "100", "CACHED": "60", "ANSWER TOKENS": "0",
        "TASKS": "4", "FAILED": "2", "PARKED": "0",
    }  # fmt: skip
    assert b[:2] == ("b", "30")
    assert ("low", "3", "0", "0") in tables["CLASS"][1]
    assert tables["KV FOUND IN"][1] == [
        ("slot", "40", "31%"), ("memory", "12", "9%"), ("disk", "0", "0%"),
        ("nowhere", "78", "60%"),
    ]  # fmt: skip
    assert [row[:3] for row in tables["KV STATES"][1]] == [
        ("slots", "3 MB", "-"), ("memory", "0 B", "-"), ("disk", "500 MB", "10 GB"),
    ]  # fmt: skip
    assert tables["SESSIONS"][1] == [
        ("running", "3"), ("requests that wait for a place", "0"), ("dormant", "0"),
        ("expired so far", "0"), ("refused so far", "0"), ("max", "100"),
    ]  # fmt: skip
    assert tables["REFUSAL REASON"][1] == [("sessions-max", "7")], "without those that are 0"
    assert tables["FINISH REASON"][1] == [("Cancelled", "9"), ("eos", "4")]


def test_the_metrics_of_stats_are_those_of_prometheus() -> None:
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        client.call("chat", context=client.context(), prompt="hello there")
        until(daemon, lambda f: f("generation_tokens_total", model_name="echo") >= 11)
        reply = client.call("stats")["stats"]["metrics"]
        scraped = scrape_metrics(daemon)
        assert "step_seconds" not in reply and "process_cpu_seconds" not in reply
        for name, suffix in (
            ("generation_tokens", "_total"),
            ("prefix_cache_hits", "_total"),
            ("kv_bytes_max", ""),
            ("slots", ""),
            ("sessions_max", ""),
        ):
            assert reply[name], name
            for sample in reply[name]:
                labels = {key: text for key, text in sample.items() if key != "value"}
                assert scraped(name + suffix, **labels) == sample["value"], sample


def test_tables_without_values_are_omitted() -> None:
    with running_daemon() as daemon:
        text = inferd("stats", socket=daemon.socket).stdout
        assert text.startswith("inferd/") and "KV FOUND IN" not in text and "REFUSAL" not in text
        assert "CLASS" in text and "SESSIONS" in text
        assert inferd("run", "echo", "hello", socket=daemon.socket).stdout == "hello\n"
        until(daemon, lambda f: f("prefix_cache_queries_total", model_name="echo") > 0)
        text = inferd("stats", socket=daemon.socket).stdout
        assert "KV FOUND IN" in text and "eos" in text
        row = next(line.split() for line in text.splitlines() if line.startswith("echo"))
        assert int(row[1]) >= len("hello") and row[4:6] == ["1", "0"]
        figures = document(inferd("stats", "--json", socket=daemon.socket))
        assert sorted(figures) == ["instance", "metrics", "models", "retry_after_ratio", "uptime_s"]
        assert MetricSums(figures).total("request_success", finished_reason="eos") == 1


def test_drain_finishes_running_tasks_and_admits_none() -> None:
    with running_daemon(SLOW) as daemon:
        socket = daemon.socket
        with inferd_process("run", "slow", LONG, "--session", "long", socket=socket) as process:
            assert process.stdout is not None and process.stdout.read(1) == b"B"
            waited = inferd("drain", "--wait", "0", socket=socket)
            assert waited.exit_code == 4
            assert "tasks that have not ended within 0 s: 1" in waited.stderr
            assert "draining" in inferd("status", socket=socket).stdout
            refused = inferd("run", "slow", "no", socket=socket)
            assert refused.exit_code != 0 and "accepts no new work" in refused.stderr
            assert process.poll() is None, "it goes on"
            assert inferd("cancel", "long", socket=socket).stdout == "cancelled\n"
            process.communicate(timeout=60)
        drained = inferd("drain", socket=socket)
        assert drained.exit_code == 0 and drained.stdout.startswith("drained: no task runs")
        assert document(inferd("drain", "--json", socket=socket)) == {"drained": True}


def test_drain_waits_until_the_last_task_has_ended() -> None:
    with running_daemon(SLOW) as daemon:
        words = "w" * 40
        with inferd_process("run", "slow", words, socket=daemon.socket) as process:
            assert process.stdout is not None and process.stdout.read(1) == b"w"
            drained = inferd("drain", socket=daemon.socket)
            assert (drained.exit_code, drained.stderr) == (0, "")
            out, _ = process.communicate(timeout=60)
            assert b"w" + out == words.encode() + b"\n"
