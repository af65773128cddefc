"""The spans of a request, the targets of spans, and the bound of a spans file."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

from inferd.daemon.config.sources import ConfigError, load_config
from inferd.daemon.traces.export import FileExporter
from inferd.daemon.traces.spans import CHAT, EMBEDDINGS, RequestFacts, Span, TurnFacts, spans_of
from inferd.daemon.traces.target import TARGET_CHARACTERS_MAX, Target, parse_target
from inferd.scheduler.messages import TurnStats

ENDED = TurnStats(stop_reason="eos", cached_tokens=3, parks=1)


def request(*turns: TurnFacts, operation: str = CHAT, error: str | None = None) -> RequestFacts:
    facts = RequestFacts("chat", operation, 10.0, 20.0, "m", error=error)
    facts.turns = list(turns)
    return facts


def times(spans: list[Span]) -> list[tuple[str, float, float]]:
    return [(span.name, span.began_at, span.ended_at) for span in spans]


def test_phases_are_consecutive() -> None:
    turn = TurnFacts(11.0, 19.0, started_at=12.0, first_token_at=13.0, stats=ENDED)
    assert times(spans_of(request(turn))) == [
        ("chat m", 10.0, 20.0),
        ("queue", 11.0, 12.0),
        ("prefill", 12.0, 13.0),
        ("decode", 13.0, 19.0),
    ]


def test_a_failed_turn_has_the_phases_that_it_reached() -> None:
    waited = TurnFacts(11.0, 19.0, error="Timeout")
    outer, queue = spans_of(request(waited))
    assert (outer.error, queue.error) == ("Timeout", "Timeout")
    assert outer.attributes["gen_ai.response.finish_reasons"] == ["error"]
    read = TurnFacts(11.0, 19.0, started_at=12.0, error="Cancelled")
    assert [span.error for span in spans_of(request(read))] == ["Cancelled", None, "Cancelled"]


def test_one_of_several_answers_may_fail() -> None:
    fine = TurnFacts(11.0, 19.0, started_at=12.0, stats=ENDED, input_tokens=5, output_tokens=2)
    failed = TurnFacts(11.0, 25.0, error="Busy", input_tokens=5)
    outer = spans_of(request(fine, failed))[0]
    assert (outer.error, outer.ended_at) == (None, 25.0)
    assert outer.attributes["gen_ai.usage.input_tokens"] == 5
    assert outer.attributes["gen_ai.response.finish_reasons"] == ["eos", "error"]
    assert spans_of(request(failed, failed))[0].error == "Busy"


def test_the_texts_of_an_embedding_request_are_one_turn() -> None:
    first = TurnFacts(11.0, 14.0, started_at=13.0, stats=ENDED, input_tokens=5)
    second = TurnFacts(12.0, 19.0, started_at=12.5, stats=ENDED, input_tokens=7)
    spans = spans_of(request(first, second, operation=EMBEDDINGS))
    assert times(spans)[1:] == [("queue", 11.0, 12.5), ("prefill", 12.5, 19.0)]
    assert spans[0].attributes["gen_ai.usage.input_tokens"] == 12
    assert spans[0].attributes["inferd.cached_tokens"] == 6


def test_a_load_that_ends_the_request_has_its_error() -> None:
    facts = request(error="Timeout")
    facts.loaded = (10.0, 20.0)
    outer, load = spans_of(facts)
    assert (load.name, load.error, outer.error) == ("load", "Timeout", "Timeout")
    assert "gen_ai.usage.input_tokens" not in outer.attributes


# Targets.


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://[::1]:4318/", "http://[::1]:4318/v1/traces"),
        ("https://example.org/otlp/traces", "https://example.org/otlp/traces"),
        ("otlp", "http://localhost:4318/v1/traces"),
    ],
)
def test_a_collector_is_named_as_opentelemetry_names_it(text: str, url: str) -> None:
    assert parse_target(text, {}) == Target(url=url)


def test_the_environment_names_the_collector_where_the_setting_says_so() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://10.0.0.1:1/base/"}
    assert str(parse_target("otlp", environ)) == "http://10.0.0.1:1/base/v1/traces"
    environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = "http://10.0.0.1:2/as-it-is"
    assert str(parse_target("otlp", environ)) == "http://10.0.0.1:2/as-it-is"
    assert parse_target("off", environ).is_off


@pytest.mark.parametrize(
    "text",
    [
        "", "on", 4318, True, "127.0.0.1:4318", "ftp://127.0.0.1", "http://", "http://h:99999",
        "http://h:0", "http://user:word@127.0.0.1", "file:relative", "file:", "/no/scheme",
        "http://h/" + "x" * TARGET_CHARACTERS_MAX,
    ],
)  # fmt: skip
def test_an_invalid_target_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_target(text, {})


@pytest.mark.parametrize("host", ["example.org", "10.0.0.1", "0.0.0.0", "[fe80::1]"])
def test_spans_leave_the_machine_only_where_that_is_allowed(host: str, tmp_path: Path) -> None:
    flags = {"traces": f"http://{host}:4318", "config": tmp_path / "config.toml"}
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="traces-network"):
        load_config(flags, {})
    assert load_config(flags | {"traces-network": "any"}, {}).traces.is_remote
    flags["traces"] = "http://127.0.0.2:4318"
    assert not load_config(flags, {}).traces.is_remote


def test_a_file_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "traces"
    exporter = FileExporter(path, bytes_max=1000)
    provider = TracerProvider(shutdown_on_exit=False)
    spans = [provider.get_tracer("t").start_span(f"span {n}") for n in range(3)]
    written = 0
    with pytest.raises(OSError, match="limit of 1000 bytes"):
        for span in spans:
            exporter.export([span])  # type: ignore[list-item]
            written += 1
    assert written and len(path.read_text().splitlines()) == written
    assert path.stat().st_size <= 1000
    path.unlink()
    exporter.export([spans[0]])  # type: ignore[list-item]
    assert path.exists()
