"""Grammars are compiled within limits, in a process of their own first, and kept by owner."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from inferd.backends import SamplingParams
from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.backends.grammars.compiler import GrammarCompiler
from inferd.backends.grammars.limits import CACHED_MAX, GRAMMAR_BYTES_MAX
from inferd.backends.llama.text.vocab import Vocab
from tests.backends.walking import compiler_of, vocabulary
from tests.tiny_gguf import write_tiny

YES = SamplingParams(grammar='root ::= "yes" | "no"')
CHAIN = "".join(f"a{i} ::= a{i + 1}\n" for i in range(15_000))
PATTERNS = [{"pattern": f"a{i}.{{{i}}}b"} for i in range(24)]
BOMBS = {
    "time": SamplingParams(json_schema='{"type": "integer", "multipleOf": 9999991}'),
    "memory": SamplingParams(json_schema=json.dumps({"type": "string", "allOf": PATTERNS})),
    "stack": SamplingParams(grammar=f'root ::= a0\n{CHAIN}a15000 ::= "x"'),
}


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    with vocabulary(write_tiny("llama", tmp_path_factory.mktemp("tiny"))) as vocab:
        yield vocab


@pytest.fixture
def compiler(vocab: Vocab) -> Iterator[GrammarCompiler]:
    with compiler_of(vocab) as compiler:
        yield compiler


def bomb(name: str) -> Any:
    """Return a parameter of a test. The bomb of time must get its CPU time within 30 s."""
    return pytest.param(BOMBS[name], id=name, marks=[pytest.mark.alone] if name == "time" else [])


@pytest.mark.process
@pytest.mark.parametrize("params", [bomb(name) for name in BOMBS])
def test_a_bomb_is_refused_and_the_next_grammar_is_compiled(
    compiler: GrammarCompiler, params: SamplingParams
) -> None:
    with pytest.raises(TooLarge) as caught:
        compiler.compile(params, owner=1)
    assert caught.value.hint and caught.value.data
    assert not compiler.compile(YES, owner=1).complete


@pytest.mark.process
def test_a_process_that_was_killed_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.compile(YES, owner=1)
    sandbox = compiler._checker._sandbox
    assert sandbox is not None
    os.kill(sandbox._process.pid, signal.SIGKILL)
    compiler.compile(YES, owner=2)
    assert compiler._checker._sandbox is not sandbox


@pytest.mark.process
def test_a_grammar_is_kept_for_its_owner_alone(compiler: GrammarCompiler) -> None:
    first = compiler.compile(YES, owner=1)
    compiler._checker.close()
    compiler.compile(YES, owner=1)
    assert compiler._checker._sandbox is None, "nothing was compiled"
    compiler.compile(YES, owner=2)
    assert compiler._checker._sandbox is not None
    token = int(first.allowed()[0])
    first.accept(token)
    assert not compiler.compile(YES, owner=1).complete, "each turn begins anew"


@pytest.mark.process
def test_few_grammars_are_kept(compiler: GrammarCompiler) -> None:
    for number in range(CACHED_MAX + 2):
        compiler.compile(SamplingParams(grammar=f'root ::= "{number}"'), owner=1)
    assert len(compiler._kept) == CACHED_MAX


@pytest.mark.process
def test_a_grammar_of_the_largest_size_is_accepted_and_one_more_byte_is_refused(
    compiler: GrammarCompiler,
) -> None:
    grammar = YES.grammar + "\n#"
    grammar += "x" * (GRAMMAR_BYTES_MAX - len(grammar))
    compiler.compile(SamplingParams(grammar=grammar), owner=1)
    with pytest.raises(TooLarge, match="bytes"):
        compiler.compile(SamplingParams(grammar=grammar + "x"), owner=1)


@pytest.mark.process
def test_what_fails_later_fails_with_an_error(compiler: GrammarCompiler, vocab: Vocab) -> None:
    """An answer beside the grammar is refused, and the state stays as it was."""
    state = compiler.compile(YES, owner=1)
    letters = {vocab.piece(token): token for token in range(vocab.size)}
    with pytest.raises(InvalidArgument, match="does not follow"):
        state.replay([letters[b"x"]])
    state.replay([letters[letter] for letter in (b"n", b"o")])
    assert state.complete
