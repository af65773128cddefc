"""Checkpoints at the borders of messages, on models whose KV states cannot be cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.base import KvKind
from inferd.backends.echo.options import EchoOptions
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.kv.disk import KvFiles
from inferd.scheduler.kv.store import message_borders, spaced, thinned
from tests.scheduler.doubles import Bench
from tests.scheduler.kv.test_kv_reuse import ask, computed, settle

MEMORIES: tuple[KvKind, ...] = ("recurrent", "hybrid")
CTX_SIZE = 4096
SETTINGS = EngineSettings(shared_prefix_tokens_min=16)
CHAT = [
    f"{who} number {turn} is a message that has {turn * 'many ' or 'some '}tokens of its own"
    for turn in range(5)
    for who in ("question", "answer")
]
"""The messages of a chat."""

points_st = st.lists(st.integers(1, 10_000), unique=True, max_size=200).map(sorted)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[KvFiles]:
    files = KvFiles(tmp_path, "echo-1")
    yield files
    files.close()


def bench_of(
    memory: KvKind,
    slots: int = 2,
    settings: EngineSettings = SETTINGS,
    files: KvFiles | None = None,
) -> Bench:
    options = EchoOptions(memory=memory)
    return Bench(slots=slots, ctx_size=CTX_SIZE, settings=settings, options=options, files=files)


def tokens_of(bench: Bench, messages: list[str]) -> list[int]:
    """Return the tokens of a chat: each question has a mark before it and one after it."""
    texts = (message.encode() for message in messages)
    return [
        token
        for number, text in enumerate(texts)
        for token in bench.model.tokenize(text, special=False, bos=number % 2 == 0)
    ]


def run(bench: Bench, number: int, messages: list[str], **fields: object) -> int:
    """Run a turn on a chat; return the number of its cached tokens."""
    bench.run(turn(bench, number, messages, **fields))
    return bench.stats(number).cached_tokens


def turn(bench: Bench, number: int, messages: list[str], **fields: object) -> m.Submit:
    packed = m.pack_tokens(tokens_of(bench, messages))
    return m.Submit(msgspec.structs.replace(bench.spec(number, "", **fields), tokens=packed))


def border(bench: Bench, messages: list[str]) -> int:
    """Return the number of tokens of a chat up to the mark that follows its last message."""
    return len(tokens_of(bench, messages)) - (len(messages) % 2)


# Places.


def test_a_border_is_before_each_control_token_that_follows_another_token() -> None:
    tokens = [100, 101, 1, 2, 100, 3, 101, 100, 4, -9, 100, 5]
    assert message_borders(tokens, lambda token: token >= 100) == [4, 6, 10]
    assert message_borders([], lambda token: True) == []


def test_points_close_to_another_one_are_left_out() -> None:
    assert spaced([3, 16, 20, 31, 32, 60], 16) == [16, 32, 60]


@given(points_st, st.integers(0, 40))
def test_thinned_points_are_few_and_have_the_first_and_the_last(
    points: list[int], count_max: int
) -> None:
    kept = thinned(points, count_max)
    assert len(kept) <= count_max and set(kept) <= set(points) and kept == sorted(kept)
    if len(points) <= count_max:
        assert kept == points
    elif count_max >= 2:
        assert (kept[0], kept[-1]) == (points[0], points[-1])


def test_thinned_points_are_dense_at_the_end() -> None:
    kept = thinned(range(100, 20_000, 100), 32)
    gaps = [after - before for before, after in pairwise(kept[1:])]
    assert 16 <= len(kept) <= 32
    assert gaps == sorted(gaps, reverse=True)
    assert kept[-4:] == [19_600, 19_700, 19_800, 19_900]


# Operations on a chat.


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("edited", [2, 4, 6, 8])
def test_an_edited_message_computes_only_the_tokens_since_its_border(
    memory: KvKind, edited: int
) -> None:
    """The chat arrives as one prompt, as from a client that keeps its history."""
    bench = bench_of(memory)
    run(bench, 1, CHAT[:9])
    start = computed(bench)

    cached = run(bench, 2, [*CHAT[:edited], "quite another question"])

    assert cached == border(bench, CHAT[:edited])
    assert bench.text(2) == b"quite another question"
    assert computed(bench) - start <= 2 * len("quite another question") + 2


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_edit_in_a_chat_of_several_turns(memory: KvKind) -> None:
    bench = bench_of(memory)
    for number in range(4):
        run(bench, number, CHAT[: 2 * number + 1], session="chat")

    for number, edited in enumerate((4, 2, 6)):
        cached = run(bench, 10 + number, [*CHAT[:edited], f"other {number}"], session="chat")
        assert cached == border(bench, CHAT[:edited])
        assert bench.text(10 + number).decode() == f"other {number}"


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_older_answer_is_generated_again(memory: KvKind) -> None:
    bench = bench_of(memory)
    run(bench, 1, CHAT[:9])

    assert run(bench, 2, CHAT[:5]) == border(bench, CHAT[:5])
    assert bench.text(2).decode() == CHAT[4]


@pytest.mark.parametrize("memory", MEMORIES)
def test_reasoning_that_the_next_prompt_lacks_is_not_computed_before_its_border(
    memory: KvKind,
) -> None:
    """The answer of the first turn, which repeats the question, is replaced by a short one."""
    bench = bench_of(memory)
    run(bench, 1, CHAT[:3], session="chat")
    start = computed(bench)

    cached = run(bench, 2, [*CHAT[:3], "short answer", CHAT[4]], session="chat")

    assert cached == border(bench, CHAT[:3])
    assert computed(bench) - start <= len("short answer") + 2 * len(CHAT[4]) + 3


@pytest.mark.parametrize("memory", MEMORIES)
def test_branches_of_an_older_turn_compute_only_their_own_tokens(memory: KvKind) -> None:
    bench = bench_of(memory, slots=4)
    run(bench, 1, CHAT[:9], session="trunk")
    turns = [
        turn(bench, 10 + i, [*CHAT[:4], f"branch number {i}"], session=f"b{i}") for i in range(4)
    ]

    bench.run(*turns)

    assert [bench.stats(10 + i).cached_tokens for i in range(4)] == [border(bench, CHAT[:4])] * 4
    assert [bench.text(10 + i).decode() for i in range(4)] == [
        f"branch number {i}" for i in range(4)
    ]
    assert run(bench, 20, CHAT[:9], session="trunk") >= border(bench, CHAT[:9]) - 1


def test_a_running_hybrid_s_state_is_cut_for_another_task() -> None:
    bench = bench_of("hybrid")
    bench.iterate(turn(bench, 1, CHAT[:9], session="one"))
    while not bench.tokens(1):
        bench.iterate()

    bench.run(turn(bench, 2, [*CHAT[:6], "another question"], session="two"))

    assert bench.stats(2).cached_tokens == border(bench, CHAT[:6])
    assert bench.text(1).decode() == CHAT[8] and bench.text(2) == b"another question"


# Memory and disk.


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("checkpoints_max", [1, 2, 5])
def test_a_conversation_has_at_most_so_many_checkpoints(
    memory: KvKind, checkpoints_max: int
) -> None:
    settings = EngineSettings(shared_prefix_tokens_min=16, checkpoints_max=checkpoints_max)
    bench = bench_of(memory, settings=settings)
    for number in range(5):
        run(bench, number, CHAT[: 2 * number + 1], session="chat")
        assert len(bench.engine.store.checkpoints) <= checkpoints_max
    run(bench, 9, [text + " in another chat" for text in CHAT[:9]], session="other")

    assert checkpoints_max <= len(bench.engine.store.checkpoints) <= 2 * checkpoints_max
    statistics = bench.engine.statistics()
    assert statistics["kv_ram_checkpoints"] == len(bench.engine.store.checkpoints)
    assert statistics["kv_ram_checkpoint_bytes"] == sum(
        len(entry.state) for entry in bench.engine.store.checkpoints
    )


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_chat_without_a_session_has_no_more_checkpoints_than_one_with_a_session(
    memory: KvKind,
) -> None:
    bench = bench_of(
        memory, settings=EngineSettings(shared_prefix_tokens_min=16, checkpoints_max=2)
    )
    for number in range(5):
        run(bench, number, CHAT[: 2 * number + 1], session=f"#{number}")
        assert len(bench.engine.store.checkpoints) <= 2


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_checkpoints_of_a_conversation_take_a_quarter_of_the_memory(memory: KvKind) -> None:
    bench = bench_of(memory, settings=EngineSettings(kv_ram_bytes=12_000))
    run(bench, 1, CHAT[:5], session="chat")
    run(bench, 2, CHAT[:7], session="chat")
    run(bench, 3, CHAT[:9], session="chat")

    store = bench.engine.store
    assert 1 <= len(store.checkpoints) < 6
    assert sum(len(entry.state) for entry in store.checkpoints) <= 12_000 / 4
    assert store.bytes <= 12_000


@pytest.mark.parametrize("memory", MEMORIES)
def test_checkpoints_outlive_a_restart(memory: KvKind, tmp_path: Path) -> None:
    first = bench_of(memory, files=KvFiles(tmp_path, "echo-1"))
    run(first, 1, CHAT[:9], session="kept", persist=True)
    first.engine.kv.close()

    files = KvFiles(tmp_path, "echo-1")
    second = bench_of(memory, files=files)
    second.iterate(turn(second, 2, [*CHAT[:6], "another question"], session="kept", persist=True))
    settle(second, files)
    second.engine.kv.close()

    assert second.stats(2).cached_tokens == border(second, CHAT[:6])
    assert second.text(2) == b"another question"


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_evicted_conversation_returns_with_its_checkpoints(
    memory: KvKind, files: KvFiles
) -> None:
    bench = bench_of(memory, slots=1, files=files)
    run(bench, 1, CHAT[:9], session="mine", persist=True)
    run(bench, 2, ["somebody else comes along"], owner=2)
    store = bench.engine.store
    bytes_max, store.bytes_max = store.bytes_max, 1
    store.evict_states()
    bench.run()
    settle(bench, files)
    assert len(store) == 0, "all of it was evicted"
    store.bytes_max = bytes_max

    bench.iterate(turn(bench, 3, [*CHAT[:4], "another question"], session="mine", persist=True))
    settle(bench, files)

    assert bench.stats(3).cached_tokens == border(bench, CHAT[:4])
    assert bench.text(3) == b"another question"


def test_a_dormant_hybrid_is_on_disk_with_checkpoints_of_at_most_its_size(files: KvFiles) -> None:
    bench = bench_of("hybrid", files=files)
    run(bench, 1, CHAT[:9], session="mine", persist=True)
    before = m.pack_tokens([*tokens_of(bench, CHAT[:9]), *bench.tokens(1)])

    assert ask(bench, m.PersistState(1, 1, "mine", (), before)) == len(before) // 4
    settle(bench, files)

    sizes = {file.key.checkpoint: [] for file in files.scan()}  # type: ignore[var-annotated]
    for file in files.scan():
        sizes[file.key.checkpoint].append(file.size)
    assert len(sizes[False]) == 1 and sizes[True]
    assert sum(sizes[True]) <= 2 * sizes[False][0]
    bench.iterate(m.DeleteSessionStates(2, 1, "mine"))
    settle(bench, files)
    assert files.scan() == []


def test_a_checkpoint_is_only_of_use_with_a_state_of_its_text() -> None:
    bench = bench_of("hybrid", slots=1, settings=EngineSettings(kv_ram_bytes=1 << 20))
    run(bench, 1, CHAT[:9])
    bench.engine.slots.clear_slot(bench.engine.slots.slots[0])
    assert bench.engine.store.checkpoints

    assert run(bench, 2, [*CHAT[:4], "another question"]) == 0
    assert bench.text(2) == b"another question"


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_checkpoint_serves_no_other_user_and_no_other_adapters(memory: KvKind) -> None:
    bench = bench_of(memory)
    run(bench, 1, CHAT[:9])

    assert run(bench, 2, [*CHAT[:4], "another"], owner=2) == 0
    assert run(bench, 3, [*CHAT[:4], "another"], adapters=("upper",)) == 0
