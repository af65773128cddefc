"""The vocabulary's form for grammars is made while the model is loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inferd.backends import LanguageModel, ModelSpec, SamplingParams, load_model
from inferd.backends.errors import Cancelled, LoadFailed
from inferd.backends.grammars.compiler import GrammarState
from inferd.backends.llama.loading.opening import open_vocab
from inferd.backends.llama.text.matching import MatchingVocab, read_pieces
from inferd.backends.llama.text.vocab import Vocab
from tests.backends.driving import load_language_model
from tests.backends.walking import vocabulary
from tests.models import gemma3, smollm2
from tests.tiny_gguf import write_tiny

YES = SamplingParams(grammar='root ::= "yes"')
NAME = "grammar vocabulary"


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def spell(model: LanguageModel) -> str:
    """Return the only text that `YES` allows, of the tokens that it allows."""
    state, text = model.compile_grammar(YES, 1), b""
    assert isinstance(state, GrammarState)
    while not state.complete:
        token = int(state.allowed()[0])
        text += model.piece(token)
        state.accept(token)
    return text.decode()


@pytest.mark.process
@pytest.mark.parametrize("source", ["path", "descriptor"])
def test_grammars_can_be_used_after_a_load(tmp_path: Path, source: str) -> None:
    path = write_tiny("llama", tmp_path)
    with path.open("rb") as file:
        where = {"path": str(path)} if source == "path" else {"fd": file.fileno()}
        model = load_language_model(ModelSpec(name="m", slots=1, ctx_size=256, **where))
    try:
        assert spell(model) == "yes"
    finally:
        model.close()
    assert not running()


@pytest.mark.model
def test_the_form_is_made_while_llama_cpp_loads_the_model() -> None:
    """So the first turn finds it, and a load takes no longer."""
    found: list[threading.Thread] = []

    def progress(_: float) -> bool:
        for thread in running() if not found else ():
            thread.join()
            found.append(thread)
        return True

    spec = ModelSpec(name="m", path=str(gemma3()), slots=1, ctx_size=256)
    model = load_language_model(spec, progress)
    try:
        assert len(found) == 1 and not running()
        assert spell(model) == "yes"
    finally:
        model.close()


def test_a_load_that_is_cancelled_ends_the_thread(tmp_path: Path) -> None:
    spec = ModelSpec(name="m", path=str(write_tiny("llama", tmp_path)), slots=1, ctx_size=256)
    with pytest.raises(Cancelled):
        load_model(spec, lambda _: False)
    assert not running()


def test_a_vocabulary_that_cannot_be_read_fails_grammars_and_nothing_else(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)

    @contextmanager
    def fails() -> Iterator[Vocab]:
        raise LoadFailed("no vocabulary", hint="try again")
        yield

    matching = MatchingVocab()
    matching.begin(fails)
    with vocabulary(path) as vocab:
        facts = matching.attach(vocab)
        assert facts.size == vocab.size and facts.ends() == vocab.eog()
        for _ in range(2):
            with pytest.raises(LoadFailed, match="no vocabulary"):
                facts.tokenizer()
        matching.close()


@pytest.mark.process
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_texts_of_tokens_are_those_of_answers(tmp_path: Path, kind: str) -> None:
    check_texts(write_tiny(kind, tmp_path))


@pytest.mark.model
@pytest.mark.parametrize("model", [smollm2, gemma3], ids=["smollm2", "gemma3"])
def test_the_texts_of_real_tokens_are_those_of_answers(model: object) -> None:
    assert callable(model)
    check_texts(model())


def check_texts(path: Path) -> None:
    with vocabulary(path) as vocab:
        lengths, texts = read_pieces(vocab, vocab.flags("llama_vocab_is_control"))
        assert len(lengths) == vocab.size and lengths.sum() == len(texts)
        begin = 0
        for token, length in enumerate(lengths.tolist()):
            mark = b"\xff" if vocab.is_control(token) else b""
            assert texts[begin : begin + length] == mark + vocab.piece(token)
            begin += length


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(LoadFailed, match=r"the vocabulary of 'empty.gguf'"), open_vocab(str(file)):
        pass
