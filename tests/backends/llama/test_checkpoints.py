"""The KV states of recurrent and hybrid models after edits, branches and restarts of a chat: the
logits equal those from scratch, and only the tokens since the nearest border are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd.backends import Chunk
from inferd.backends.errors import UnsupportedOperation
from inferd.backends.llama.model import LlamaModel
from inferd.scheduler import EngineSettings
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.kv.disk import KvFiles
from tests.backends.driving import generate, prefill
from tests.backends.llama.test_jump_forward import Runner, spec_of
from tests.backends.tiny import SLOTS, assert_as_from_scratch, load_tiny, tokens_of

KINDS = ("mamba", "lfm2", "jamba")
BEGIN, END = 1, 2
"""The control tokens before and after each message."""
CHAT = [[BEGIN, *tokens_of(30 + number, 40 + 9 * number), END] for number in range(9)]
OTHER = [BEGIN, *tokens_of(50, 33), END]
SETTINGS = EngineSettings(shared_prefix_tokens_min=16)


@pytest.fixture(scope="module", params=KINDS)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LlamaModel]]:
    model = load_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    yield request.param, model
    model.close()


@pytest.fixture(scope="module")
def reference(
    loaded: tuple[str, LlamaModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaModel]:
    """Return another model of the same kind, which computes everything from scratch."""
    model = load_tiny(loaded[0], tmp_path_factory.mktemp("reference"))
    yield model
    model.close()


@pytest.fixture
def chats(tiny: LlamaModel, reference: LlamaModel) -> Chats:
    return Chats(tiny, reference)


@pytest.fixture(params=["computed", "restored"])
def restored(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "restored")


def flat(*messages: list[int]) -> list[int]:
    return [token for message in messages for token in message]


# The model alone.


@pytest.mark.parametrize("at", [1, 2, 63, 64, 200, 399, 400])
def test_a_hybrid_s_slot_is_cut_back_to_a_checkpoint(
    tiny: LlamaModel, kind: str, at: int, restored: bool
) -> None:
    tokens, more, beside = tokens_of(1, 400), tokens_of(2, 70), tokens_of(3, 90)
    prefill(tiny, 1, beside)
    prefill(tiny, 0, tokens[:at])
    if kind == "mamba":
        assert tiny.save_checkpoint(0) == tiny.save(0), "all of the state is recurrent"
        return
    checkpoint = tiny.save_checkpoint(0)
    prefill(tiny, 0, tokens[at:], at)
    if restored:
        assert tiny.restore(2, tiny.save(0))
    slot = 2 if restored else 0

    assert tiny.restore_checkpoint(slot, checkpoint)
    assert tiny.length(slot) == at
    prefill(tiny, slot, more, at)
    assert_as_from_scratch(tiny, slot, tokens[:at] + more)
    prefill(tiny, 1, more, len(beside))
    assert_as_from_scratch(tiny, 1, beside + more)


def test_a_hybrid_s_checkpoints_serve_again_and_are_smaller(tiny: LlamaModel, kind: str) -> None:
    tokens, checkpoints = tokens_of(4, 500), []
    for begin in range(0, 500, 100):
        prefill(tiny, 0, tokens[begin : begin + 100], begin)
        checkpoints.append(tiny.save_checkpoint(0))
    if kind == "mamba":
        return
    sizes = {len(checkpoint) for checkpoint in checkpoints}
    assert len(sizes) == 1 and max(sizes) < len(tiny.save(0)) / 2
    for index in (3, 1, 1, 0):
        at = 100 * (index + 1)
        assert tiny.restore_checkpoint(0, checkpoints[index])
        more = tokens_of(60 + index, 30)
        tiny.step([Chunk(0, more, at, logits=True)])
        assert_as_from_scratch(tiny, 0, tokens[:at] + more)
        assert tiny.restore_checkpoint(0, checkpoints[index])
        prefill(tiny, 0, tokens[at : at + 100], at)


@pytest.mark.parametrize(
    "damage", ["nothing", "cut", "longer", "magic", "key", "body", "length", "whole", "later"]
)
def test_a_checkpoint_that_does_not_fit_leaves_the_slot_empty(
    tiny: LlamaModel, kind: str, damage: str
) -> None:
    tokens = tokens_of(5, 120)
    prefill(tiny, 0, tokens[:50])
    state, whole = tiny.save_checkpoint(0), tiny.save(0)
    prefill(tiny, 0, tokens[50:], 50)
    prefill(tiny, 1, [*tokens, 9])
    damaged = {
        "nothing": b"",
        "cut": state[:-7],
        "longer": state + b"x",
        "magic": b"xxxx" + state[4:],
        "key": state[:4] + bytes(16) + state[20:],
        "body": state[:28] + bytes(8) + state[36:],
        "length": state[:20] + b"\x31" + state[21:],
        "whole": whole,
        "later": tiny.save_checkpoint(1),
    }[damage]

    assert not tiny.restore_checkpoint(0, damaged)
    assert tiny.length(0) == 0
    prefill(tiny, 0, tokens)
    assert_as_from_scratch(tiny, 0, tokens)
    assert kind == "mamba" or not tiny.restore(0, state), "a checkpoint is not a whole state"


def test_models_whose_states_can_be_cut_have_no_checkpoints(tmp_path: Path) -> None:
    model = load_tiny("llama", tmp_path)
    prefill(model, 0, tokens_of(6, 20))
    with pytest.raises(UnsupportedOperation):
        model.save_checkpoint(0)
    model.close()


# The engine.


class Chats:
    """An engine with turns on chats, whose answers are compared with those of *reference*."""

    def __init__(
        self,
        model: LlamaModel,
        reference: LlamaModel,
        settings: EngineSettings = SETTINGS,
        files: KvFiles | None = None,
    ):
        self.reference = reference
        self.runner = Runner(model, settings)
        self.runner.engine = Engine(model, settings, files=files)
        self.number = 0

    def run(self, *messages: list[int], **fields: Any) -> int:
        """Run a turn; return the number of tokens of its prompt that it computes."""
        self.number += 1
        prompt = flat(*messages)
        fields = {"n_predict": 12, "temp": 0.0, "session": "chat"} | fields
        spec = spec_of(self.number, prompt, **fields)
        tokens = self.runner.run([spec])[self.number].tokens
        self.reference.trim(0, 0)
        assert generate(self.reference, 0, prompt, count=len(tokens)) == tokens
        return len(prompt) - self.runner.ends[self.number].stats.cached_tokens

    def answer(self, number: int = 0) -> list[int]:
        return self.runner.answer(number or self.number).tokens

    def check_logits(self) -> None:
        """Compare the logits after each state in a slot with those from scratch. The engine is of
        no use after this.
        """
        model, slots = self.runner.model, self.runner.engine.slots.slots
        states = [(list(s.tokens), model.save(s.index)) for s in slots if s.tokens]
        assert states
        for tokens, state in states:
            assert model.restore(0, state)
            prefill(model, 0, [9], len(tokens))
            assert_as_from_scratch(model, 0, [*tokens, 9])


SLACK = 16
"""A border closer than this to the previous checkpoint has none of its own."""


@pytest.mark.parametrize("edited", [2, 4, 6, 8])
def test_an_edited_message(chats: Chats, edited: int) -> None:
    chats.run(*CHAT)

    assert chats.run(*CHAT[:edited], OTHER) <= len(OTHER) + SLACK
    chats.check_logits()


def test_an_answer_generated_again(chats: Chats) -> None:
    chats.run(*CHAT[:5])
    assert chats.run(*CHAT[:5]) <= SLACK
    chats.run(*CHAT)
    assert chats.run(*CHAT[:5]) <= SLACK
    chats.check_logits()


def test_reasoning_that_the_next_prompt_lacks(chats: Chats) -> None:
    prompt = flat(*CHAT[:3], [BEGIN, 70, 71, 72])
    chats.run(prompt, n_predict=40)
    next_prompt = flat(*CHAT[:3], [BEGIN, 80, 81, END], OTHER)
    assert chats.run(next_prompt) <= len(next_prompt) - len(flat(*CHAT[:3])) + SLACK
    chats.check_logits()


def test_a_next_turn_and_a_branch(chats: Chats) -> None:
    chats.run(*CHAT[:3])
    trunk = flat(*CHAT[:3], chats.answer())
    assert chats.run(trunk, OTHER) <= len(OTHER) + SLACK
    assert chats.run(trunk, CHAT[4], session="branch") <= len(CHAT[4]) + SLACK
    assert chats.run(trunk, CHAT[5]) <= len(CHAT[5]) + SLACK
    chats.check_logits()


@pytest.mark.parametrize("way", ["restart", "eviction"])
def test_an_edit_after_a_return_from_disk(
    tiny: LlamaModel, reference: LlamaModel, tmp_path: Path, way: str
) -> None:
    files = KvFiles(tmp_path, tiny.info.fingerprint)
    chats = Chats(tiny, reference, files=files)
    chats.run(*CHAT, persist=True)
    if way == "restart":
        chats.runner.engine.kv.close()
        files = KvFiles(tmp_path, tiny.info.fingerprint)
        chats = Chats(tiny, reference, files=files)
    else:
        engine = chats.runner.engine
        store, bytes_max = engine.store, engine.store.bytes_max
        engine.kv.idle.save_and_clear_all()
        store.bytes_max = 1
        store.evict_states()
        engine.kv.spill()
        assert files.flush(10) and len(store) == 0
        store.bytes_max = bytes_max

    assert chats.run(*CHAT[:4], OTHER, persist=True) <= len(OTHER) + SLACK
    assert chats.run(*CHAT[:6], OTHER, persist=True) <= len(OTHER) + SLACK
    chats.check_logits()
    files.close()


def test_turns_of_many_chats_over_few_slots(chats: Chats) -> None:
    """Each chat returns with an edit of an older turn after others have taken its slot."""
    own = [[BEGIN, *tokens_of(90 + number, 60), END] for number in range(2 * SLOTS)]
    for number, first in enumerate(own):
        chats.run(first, *CHAT[:4], session=f"s{number}")
    for number, first in enumerate(own):
        session = f"s{number}"
        assert chats.run(first, *CHAT[:2], OTHER, session=session) <= len(OTHER) + SLACK
    chats.check_logits()


def test_checkpoints_are_bounded_and_the_newest_stay(
    tiny: LlamaModel, reference: LlamaModel
) -> None:
    chats = Chats(tiny, reference, EngineSettings(shared_prefix_tokens_min=16, checkpoints_max=4))
    chats.run(*CHAT)
    assert len(chats.runner.engine.store.checkpoints) == 4
    assert chats.run(*CHAT[:8], OTHER) <= len(OTHER) + SLACK
    chats.check_logits()
