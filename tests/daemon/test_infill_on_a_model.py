"""Text between two others, by a model of llama.cpp whose vocabulary has the tokens for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inferd import Client, Infill, UnsupportedOperation
from inferd.testing import RunningDaemon, running_daemon
from tests.tiny_gguf import write_tiny

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]
CONFIG = "[defaults]\nthreads = 1\nctx-size = 4096\n"
GREEDY: dict[str, Any] = {"temp": 0.0, "n_predict": 8, "ignore_eos": True}
SUFFIX = "\n\nprint(f(3))\n"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    for kind in ("fim", "fim-gemma3", "llama"):
        write_tiny(kind, models)
    with running_daemon(CONFIG, models_dir=models) as running:
        yield running


def ids(client: Client, model: str) -> dict[str, int]:
    graph = client.load_by_name(model)
    return {name: token["id"] for name, token in graph.special_tokens.items()}


@pytest.mark.parametrize("suffix_first", [False, True])
def test_the_answer_is_that_to_the_same_prompt_in_tokens(
    client: Client, suffix_first: bool
) -> None:
    graph = client.load_by_name("tiny-fim")
    special = ids(client, "tiny-fim")

    def of(text: str) -> list[int]:
        return client.tokenize(graph, text)

    head = [special["fim-pre"], *of("def f(x):\n"), *of("  re")]
    tail = [special["fim-suf"], *of(SUFFIX)]
    first, second = (tail, head) if suffix_first else (head, tail)
    prompt = [
        *(special["fim-rep"], *of("myproject\n")),
        *(special["fim-sep"], *of("a.py\n"), *of("x = 1\n")),
        *(special["fim-sep"], *of("filename\n"), special["bos"]),
        *(*first, *second, special["fim-mid"]),
    ]
    with client.session("tiny-fim") as session:
        expected = session.chat(prompt, **GREEDY)
    found = client.infill(
        "tiny-fim",
        "def f(x):\n",
        SUFFIX,
        typed="  re",
        extra=[("a.py", "x = 1\n")],
        suffix_first=suffix_first,
        **GREEDY,
    )
    assert found.metadata["input_tokens"] == len(prompt)
    assert (str(found), found.metadata["output_tokens"]) == (str(expected), 8)


def test_names_of_special_tokens_in_a_file_are_texts(client: Client) -> None:
    texts = ("<|fim_middle|>", "</s>", "myproject\n", "filename\n")
    graph = client.load_by_name("tiny-fim")
    tokens = [len(client.tokenize(graph, text)) for text in texts]
    found = client.infill("tiny-fim", *texts[:2], **GREEDY)
    assert found.metadata["input_tokens"] == sum(tokens) + 6 > len("".join(texts))


@pytest.mark.parametrize("suffix_first", [False, True])
def test_the_prompts_of_a_buffer_share_the_state_of_their_beginning(
    client: Client, suffix_first: bool
) -> None:
    """While somebody types at the end of a long prefix, only the rest is computed."""
    lines = "".join(f"value_{number} = {number}\n" for number in range(200))
    suffix = SUFFIX * 20
    computed = []
    for typed in range(0, 40, 4):
        prefix = lines[: 2000 + typed]
        found = client.infill("tiny-fim", prefix, suffix, suffix_first=suffix_first, **GREEDY)
        metadata = found.metadata
        computed.append(metadata["input_tokens"] - metadata["cached_tokens"])
    # The suffix behind the prefix is computed again, unless it is first.
    most = 24 if suffix_first else len(suffix) + 24
    moved = [each for each in computed[1:] if each > most]
    assert len(moved) <= 1, computed


def test_a_window_of_attention_does_not_make_a_reused_state_wrong(client: Client) -> None:
    first = client.infill("tiny-fim-gemma3", "abc" * 100, SUFFIX, **GREEDY)
    again = client.infill("tiny-fim-gemma3", "abc" * 100 + "d", SUFFIX, **GREEDY)
    fresh = client.infill(
        "tiny-fim-gemma3", "abc" * 100 + "d", SUFFIX, cache_prompt=False, **GREEDY
    )
    assert str(again) == str(fresh)
    assert first.metadata["input_tokens"] + 1 == again.metadata["input_tokens"]
    assert fresh.metadata["cached_tokens"] == 0


def test_a_file_that_is_longer_than_the_context_is_filled_in(client: Client) -> None:
    long = "x = 1\n" * 5000
    found = client.infill("tiny-fim", long, long, extra=[("a", long), ("b", long)], **GREEDY)
    assert 3000 < found.metadata["input_tokens"] <= 4096 - 8
    assert found.metadata["output_tokens"] == 8


def test_an_infill_replaces_the_history_of_its_session(client: Client) -> None:
    with client.session("tiny-fim") as session:
        session.chat("Hello", **GREEDY)
        first = session.chat(Infill(prefix="a", suffix="b"), **GREEDY)
        with client.session("tiny-fim") as other:
            assert str(other.chat(Infill(prefix="a", suffix="b"), **GREEDY)) == str(first)


def test_a_model_without_the_tokens_is_refused(client: Client) -> None:
    with pytest.raises(UnsupportedOperation, match="no tokens for prefix, suffix, middle"):
        client.infill("tiny-llama", "a", "b")
