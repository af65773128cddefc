"""llguidance's C interface gives the results of its Python interface, and releases the GIL."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from inferd.backends.errors import BackendError
from inferd.backends.grammars import native
from inferd.backends.grammars.json_schema.schema_grammar import grammars_of_schema
from inferd.backends.grammars.limits import MATCHING_LIMITS
from inferd.backends.grammars.native import Matcher, MatchingTokenizer
from inferd.backends.llama.text.matching import MatchingVocab, read_pieces
from inferd.backends.llama.text.vocab import Vocab
from tests.backends.llama.schemas import SCHEMAS
from tests.backends.walking import vocabulary
from tests.models import gemma3, smollm2

WALKED = ("objects-6", "used-1", "strings-4", "referring-7", "combined-6", "enums-14")
STEPS_MAX = 60


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    with vocabulary(smollm2()) as vocab:
        yield vocab


@pytest.fixture(scope="module")
def ours(vocab: Vocab) -> Iterator[MatchingTokenizer]:
    matching = MatchingVocab()
    matching.attach(vocab)
    yield matching.wait()
    matching.close()


@pytest.fixture(scope="module")
def theirs(vocab: Vocab) -> LLTokenizer:
    tokens = range(vocab.size)
    pieces = [b"\xff" * vocab.is_control(token) + vocab.piece(token) for token in tokens]
    return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined, no-any-return]
        tokens=pieces,
        vocab_ptr=vocab.address,
        tokenize_fptr=ctypes.cast(lib._lib.llama_tokenize, ctypes.c_void_p).value,
        eos_token=list(vocab.eog()),
        slices=LLTokenizer.json_slices(),
    )


def tokens_of(mask: NDArray[np.uint8]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


@pytest.mark.model
@pytest.mark.parametrize("name", WALKED)
def test_both_interfaces_allow_and_force_the_same(
    ours: MatchingTokenizer, theirs: LLTokenizer, name: str
) -> None:
    grammar = next(grammars_of_schema(dict(SCHEMAS[name])))
    one = Matcher.compile(ours, grammar)
    other = LLMatcher(theirs, grammar, log_level=0, limits=MATCHING_LIMITS)
    source = random.Random(name)
    for _ in range(STEPS_MAX):
        mask = one.compute_bitmask()
        assert mask.tobytes() == other.compute_bitmask()[: len(mask)]
        assert one.compute_ff_tokens() == other.compute_ff_tokens()
        assert one.is_accepting() == other.is_accepting()
        assert one.is_stopped() == other.is_stopped()
        allowed = tokens_of(mask)
        for tried in (source.choice(allowed), source.randrange(ours.size)):
            assert one.allows(tried) == (other.validate_tokens([tried]) == 1)
        token = source.choice(allowed)
        assert one.consume_token(token) is other.consume_token(token) is True
        assert not one.is_error() and not other.is_error()
        if token in ours.ends:
            break


@pytest.mark.model
def test_a_copy_changes_independently_and_errors_are_reported(ours: MatchingTokenizer) -> None:
    first = Matcher.compile(ours, next(grammars_of_schema({"enum": [1, 2]})))
    [one, two] = (
        int(t) for t in np.flatnonzero(np.unpackbits(first.compute_bitmask(), bitorder="little"))
    )
    copy = first.deep_copy()
    assert copy.consume_token(one) and copy.is_accepting() and not first.is_accepting()
    assert first.allows(two) and not copy.allows(two)
    assert not copy.consume_token(two) and copy.is_error() and copy.get_error()
    assert "\n" not in copy.get_error()
    assert not first.is_error() and not first.get_error()
    assert Matcher.compile(ours, "start: nothing").is_error()


def test_the_limits_have_the_layout_of_the_library() -> None:
    """The library writes its defaults into our structure; a wrong layout would mix them up."""
    init = native._MatcherInit()
    set_defaults = native._without_gil.llg_constraint_init_set_defaults
    set_defaults.argtypes, set_defaults.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    room = ctypes.create_string_buffer(ctypes.sizeof(init) + 64)
    room.raw = b"\xaa" * len(room)
    set_defaults(room, None)
    assert room.raw.endswith(b"\xaa" * 64), "the library's structure is larger"
    written = native._MatcherInit.from_buffer(room)
    defaults = LLParserLimits()
    for name, _ in native._Limits._fields_:
        assert getattr(written.limits, name) == getattr(defaults, name), name


def test_a_vocabulary_that_is_none_is_refused() -> None:
    with pytest.raises(BackendError, match="llguidance cannot use the vocabulary: EOS token"):
        MatchingTokenizer(np.array([1], np.uint32), b"a", [7], list)


@pytest.mark.model
def test_other_threads_run_while_the_form_of_a_vocabulary_is_made() -> None:
    """Python's interface holds the GIL for as long as it takes: a second with 262k tokens."""
    with vocabulary(gemma3()) as vocab:
        ends, control = vocab.eog(), vocab.flags("llama_vocab_is_control")
        lengths, texts = read_pieces(vocab, control)
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        while not ended.is_set():
            pass

    worker = threading.Thread(target=work)
    worker.start()
    begun.wait()
    clock = time.pthread_getcpuclockid(worker.ident or 0)
    before_s, own_before_s = time.clock_gettime(clock), time.thread_time()
    tokenizer = MatchingTokenizer(lengths, texts, ends, list)
    worked_s, own_s = time.clock_gettime(clock) - before_s, time.thread_time() - own_before_s
    ended.set()
    worker.join()
    assert tokenizer.size == len(lengths) == 262_144
    assert worked_s > own_s / 4, "of the time of the processor, which busy processes do not change"
