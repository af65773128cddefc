"""Origins of parameters in force, reports of adjusted ones, and parameters of KV state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inferd.backends.echo.options import VOCAB_SIZE
from inferd.backends.errors import InvalidArgument
from inferd.backends.params import PARAMETERS, read_options
from inferd.scheduler.owner import Owner
from inferd.sessions import Opening, Session, TurnOptions
from inferd.sessions.turn.options import Parameters
from inferd.wire.metadata import Metadata
from tests.sessions.doubles import Harness

HERE = object()


def effective(parameters: Parameters, name: str) -> tuple[Any, str, str]:
    found = next(e for e in parameters.effective() if e.name == name)
    return found.value, found.origin, found.adjusted


def test_each_level_overrides_the_ones_before_it() -> None:
    """built-in → file → model → graph → session → turn."""
    defaults = {"temp": 0.1, "top-k": 10, "top-p": 0.2}
    parameters = Parameters(defaults, {"temp": "file", "top-k": "model"})

    assert effective(parameters, "min-p") == (0.05, "built-in", "")
    assert effective(parameters, "temp") == (0.1, "file", "")
    assert effective(parameters, "top-k") == (10, "model", "")
    assert effective(parameters, "top-p") == (0.2, "graph", "")
    parameters.apply(read_options({"temp": 0.3}))
    assert effective(parameters, "temp") == (0.3, "session", "")
    parameters.set_turn_options({"temp": 0.4})
    assert effective(parameters, "temp") == (0.4, "turn", "")
    parameters.set_turn_options({})
    assert effective(parameters, "temp") == (0.3, "session", "")
    assert [e.name for e in parameters.effective()] == [p.name for p in PARAMETERS]


def test_an_adjusted_value_is_reported() -> None:
    parameters = Parameters({"samplers": ["top-k"]}, {"samplers": "model"})
    parameters.apply(read_options({"mirostat": 2}))

    value, origin, why = effective(parameters, "samplers")
    assert (value, origin) == (["temperature"], "model")
    assert "mirostat" in why


def test_what_cannot_hold_together_changes_nothing() -> None:
    parameters = Parameters({})
    bad: list[dict[str, Any]] = [{"dry-sequence-breakers": []}, {"samplers": ["infill"]}]
    for options in bad:
        with pytest.raises(InvalidArgument):
            parameters.apply(read_options(options))
        with pytest.raises(InvalidArgument):
            parameters.set_turn_options(options)
    assert parameters.options == {} and effective(parameters, "samplers")[1] == "built-in"


@pytest.mark.parametrize("name", ["threads", "slots", "append", "keep-alive"])
def test_a_turn_cannot_set_what_does_not_hold_for_a_turn(name: str) -> None:
    good = next(p for p in PARAMETERS if p.name == name)
    value = True if good.kind == "bool" else 4
    with pytest.raises(InvalidArgument, match=f"{name}: applies to a {good.level}"):
        Parameters({}).set_turn_options({name: value})


# On an engine


def opened(harness: Harness, **fields: object) -> Session:
    session, _ = harness.manager.open_session(
        Opening(HERE, Owner(1000), harness.source, {}, **fields)  # type: ignore[arg-type]
    )
    return session


async def turn(harness: Harness, session: Session, text: bytes, **options: object) -> Metadata:
    await session.set_input(text)
    begun = await session.start_turn(TurnOptions(options=options))
    harness.port.run()
    await session.finish_turn(begun)
    return session.metadata()


@pytest.mark.asyncio
async def test_without_cache_prompt_everything_is_computed_anew() -> None:
    harness, text = Harness(), b"a text of some length " * 5
    session = opened(harness)

    first = await turn(harness, session, text)
    again = await turn(harness, session, text)
    anew = await turn(harness, session, text, **{"cache-prompt": False})
    then = await turn(harness, session, text)

    assert first.cached_tokens == anew.cached_tokens == 0
    assert again.cached_tokens == then.cached_tokens == first.input_tokens - 1


@pytest.mark.asyncio
async def test_a_session_that_rested_longer_than_its_retention_is_computed_anew() -> None:
    harness, text = Harness(), b"a text of some length " * 5
    session = opened(harness)
    session.set_options({"retention-ms": 60_000})

    size = (await turn(harness, session, text)).input_tokens
    harness.now += 60
    assert (await turn(harness, session, text)).cached_tokens == size - 1
    harness.now += 60.001
    assert (await turn(harness, session, text)).cached_tokens == 0
    session.set_options({"retention-ms": -1})
    harness.now += 3600
    assert (await turn(harness, session, text)).cached_tokens == size - 1


@pytest.mark.asyncio
async def test_a_new_session_with_a_retention_shares_what_others_computed() -> None:
    harness, text = Harness(), b"a text of some length " * 5
    size = (await turn(harness, opened(harness), text)).input_tokens
    other = opened(harness)
    other.set_options({"retention-ms": 0})

    assert (await turn(harness, other, text)).cached_tokens == size - 1
    harness.now += 0.001
    assert (await turn(harness, other, text)).cached_tokens == 0


@pytest.mark.asyncio
async def test_the_metadata_have_adjusted_values() -> None:
    harness = Harness()
    session = opened(harness)
    metadata = await turn(harness, session, b"abc", **{"dry-base": 0.5})
    assert list(metadata.adjusted) == ["dry-base"]
    assert list(msgspec.json.decode(session.read_output(1))["adjusted"]) == ["dry-base"]
    assert (await turn(harness, session, b"abc")).adjusted == {}


@pytest.mark.asyncio
async def test_biases_outside_the_vocabulary_are_left_out_and_named() -> None:
    harness, most = Harness(), VOCAB_SIZE - 1
    session = opened(harness)
    session.set_options({"logit-bias": [[most, 1], [VOCAB_SIZE, 2], ["a", 1]]})

    adjusted = (await turn(harness, session, b"some text")).adjusted
    assert adjusted["logit-bias"].startswith(f"tokens outside the vocabulary of {VOCAB_SIZE}: ")
    assert adjusted["logit-bias"].endswith(f": {VOCAB_SIZE}")
    many = {"logit-bias": [[most, 1], *([token, 1] for token in range(10**6, 10**6 + 9))]}
    adjusted = (await turn(harness, session, b"some text", **many)).adjusted
    assert adjusted["logit-bias"].endswith(": 1000000, 1000001, 1000002, 1000003 and 5 more")
    adjusted = (await turn(harness, session, b"some text", **{"logit-bias": [[most, 1]]})).adjusted
    assert "vocabulary" not in adjusted.get("logit-bias", "")
