"""Answers of a model with drafts of its NextN layer equal those without, whatever happens to the
slots meanwhile.

The layer predicts most tokens, or nearly none. The tiny models are of F32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as lib
from msgspec.structs import replace

from inferd.backends import Chunk
from inferd.backends.errors import BackendError
from inferd.backends.llama.kv.draft_models import STATES_MAX, NextnDraftModel
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Priority
from tests.backends.tiny import tiny_spec, tokens_of
from tests.scheduler.engine.test_real_draft_models import line_of
from tests.scheduler.engine.test_real_drafts import GREEDY, Line, spec_of
from tests.tiny_gguf import write_tiny

RIGHT, HYBRID, RIGHT_BATCH = "nextn-token", "nextn-hybrid", 60
"""The models whose layer predicts most tokens, and the size of their batches, which tells them
apart.
"""
Drive = Callable[[Line, str], None]


@pytest.fixture(scope="module", params=["nextn", RIGHT, HYBRID])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaModel]:
    path = write_tiny(request.param, tmp_path_factory.mktemp("models"))
    spec = replace(tiny_spec(path, slots=1), nextn=True)
    if request.param in (RIGHT, HYBRID):
        spec = replace(spec, batch_size=RIGHT_BATCH)
    with contextlib.closing(load_llama(spec, lambda _: True)) as found:
        yield found


def layers_of(model: LlamaModel) -> NextnDraftModel:
    assert isinstance(model.draft, NextnDraftModel)
    return model.draft


def cached(model: LlamaModel, tokens: int) -> int:
    """Return how many of *tokens* in a slot are reused; a hybrid's from a checkpoint in the prompt
    on.
    """
    return tokens if model.info.kv_kind == "plain" else 30


def submitted(number: int, prompt: Sequence[int], speculation: str, **fields: Any) -> m.Submit:
    values = {"n_predict": 60, "no_cache": False, "owner": Owner(1)} | fields
    return spec_of(number, list(prompt), GREEDY, speculation=speculation, **values)


def compare(model: LlamaModel, drive: Drive, answers: Sequence[int] = (1,)) -> None:
    """Check that *drive* gets the same answers with and without drafts."""
    found, stats = [], []
    for speculation in ("off", "mtp"):
        with contextlib.closing(line_of(model)) as line:
            drive(line, speculation)
            found.append([line.tokens(number) for number in answers])
            stats += [line.stats(number) for number in answers]
            assert not line.engine.speculation.by_model.error
    assert found[0] == found[1] and all(found[0])
    assert stats[-1].drafted_tokens
    drafted, accepted = (
        sum(s.drafted_tokens for s in stats),
        sum(s.accepted_tokens for s in stats),
    )
    low, high = (0.35, 1) if model.info.batch_size == RIGHT_BATCH else (0, 0.2)
    assert low <= accepted / drafted <= high


def test_an_urgent_turn_takes_the_only_slot(model: LlamaModel) -> None:
    """The states of the turn that it parks are lost with the slot, its answer is not."""

    def drive(line: Line, speculation: str) -> None:
        first = submitted(1, tokens_of(3, 70), speculation, priority=Priority.LOW)
        line.run(first, steps=9)
        urgent = submitted(2, tokens_of(4, 30), "off", priority=Priority.URGENT, owner=Owner(2))
        line.run(replace(urgent, task=replace(urgent.task, n_predict=5)))
        assert line.stats(1).parks == 1

    compare(model, drive)


def test_a_rewound_history(model: LlamaModel) -> None:
    """The second turn continues from within the first one's answer."""

    def drive(line: Line, speculation: str) -> None:
        line.run(submitted(1, tokens_of(5, 40), speculation))
        history = [*tokens_of(5, 40), *line.tokens(1)[:20], *tokens_of(6, 4)]
        line.run(submitted(2, history, speculation))
        assert line.stats(2).cached_tokens >= cached(model, 58)

    compare(model, drive, (1, 2))


def test_a_cancelled_turn_leaves_no_drafts(model: LlamaModel) -> None:
    def drive(line: Line, speculation: str) -> None:
        line.run(submitted(1, tokens_of(7, 40), speculation, n_predict=400), steps=11)
        line.run(m.Cancel(1))
        history = [*tokens_of(7, 40), *line.tokens(1)[:5]]
        line.run(submitted(2, [*history, 9], speculation))
        assert line.stats(2).cached_tokens >= cached(model, len(history) - 1)

    compare(model, drive, (2,))


def test_a_state_that_was_saved_has_no_hidden_states(model: LlamaModel) -> None:
    """Another user's turn comes between two of a session, whose state is restored from memory."""

    def drive(line: Line, speculation: str) -> None:
        line.run(submitted(1, tokens_of(8, 60), speculation))
        line.run(submitted(2, tokens_of(9, 60), speculation, owner=Owner(2)))
        history = [*tokens_of(8, 60), *line.tokens(1), 30, 31]
        line.run(submitted(3, history, speculation))
        assert line.stats(3).cached_tokens >= 118

    compare(model, drive, (1, 2, 3))


def test_a_prompt_longer_than_the_states_that_are_kept(model: LlamaModel) -> None:
    size = STATES_MAX + 200

    def drive(line: Line, speculation: str) -> None:
        line.run(submitted(1, tokens_of(2, size), speculation))
        if speculation == "mtp":
            assert layers_of(model).length(0) > size
            first = lib.llama_memory_seq_pos_min(layers_of(model)._memory, 0)
            assert first == size - STATES_MAX + 1

    compare(model, drive)


def test_a_shifted_context(model: LlamaModel) -> None:
    if not model.info.can_shift:
        assert model.info.kv_kind == "hybrid"
        return

    def drive(line: Line, speculation: str) -> None:
        prompt = tokens_of(2, 1000)
        line.run(submitted(1, prompt, speculation, ctx_shift=True))
        assert line.stats(1).shifts

    compare(model, drive)


def test_turns_go_on_without_layers_that_fail(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, calls = layers_of(model).compute, 0

    def fails(chunks: Sequence[Chunk]) -> list[int]:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise BackendError("no")
        return compute(chunks)

    monkeypatch.setattr(layers_of(model), "compute", fails)
    found = []
    for speculation in ("off", "mtp"):
        with contextlib.closing(line_of(model)) as line:
            line.run(submitted(1, tokens_of(3, 30), speculation))
            found.append(line.tokens(1))
            error = line.engine.speculation.by_model.error
    assert found[0] == found[1] and error == "no" and calls == 3


def test_drafts_are_counted_by_their_drafter(model: LlamaModel) -> None:
    with contextlib.closing(line_of(model)) as line:
        line.run(submitted(1, tokens_of(3, 30), "mtp"))
        counts, stats = line.engine.metrics.counts, line.stats(1)
        assert counts["drafted_mtp"] == stats.drafted_tokens > 0
        assert counts["accepted_mtp"] == stats.accepted_tokens
        assert not counts["drafted_draft"]


def test_without_the_layers_the_drafter_is_that_of_auto(tmp_path: Path) -> None:
    spec = tiny_spec(write_tiny(RIGHT, tmp_path), slots=1)
    with contextlib.closing(load_llama(spec, lambda _: True)) as model:
        assert model.draft is None
        with contextlib.closing(Line(model)) as line:
            line.run(submitted(1, tokens_of(3, 30), "mtp"))
            assert not line.engine.metrics.counts["drafted_mtp"]
