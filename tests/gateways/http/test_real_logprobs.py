"""Log-likelihoods of real models over HTTP, as an evaluation requests them, equal those of a bare
llama.cpp loop that decodes token by token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.backends.tiny import NOISE_MAX, Bare, tokens_of
from tests.models import ONE_THREAD, smollm2
from tests.tiny_gguf import VOCAB_SIZE, write_tiny

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
EXACT = 'flash-attn = "off"\ncache-type-k = "f32"\ncache-type-v = "f32"\n'
TINY = "".join(
    f"[models.{kind}]\nslots = 4\nctx-size = 512\nbatch-size = 64\n{EXACT}"
    for kind in ("llama", "gemma3", "lfm2")
)
CONFIG = f"{ONE_THREAD}{TINY}[models.smollm2]\nslots = 4\nctx-size = 512\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "gemma3", "lfm2"):
        write_tiny(kind, folder).rename(folder / f"{kind}.gguf")
    (folder / "smollm2.gguf").symlink_to(smollm2())
    return folder


@pytest.fixture(scope="module")
def daemon(models: Path) -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG, models_dir=models) as running:
        yield running


def bare_logprobs(path: Path, tokens: list[int]) -> list[NDArray[np.float64]]:
    """Return the logprobs of all tokens after each of *tokens*, decoded one by one."""
    with contextlib.closing(Bare(path)) as bare:
        found = []
        for position, token in enumerate(tokens):
            logits = bare.decode(0, [token], position).astype(np.float64)
            found.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        return found


def request(api: openai.OpenAI, model: str, prompts: list[list[int]]) -> list[Any]:
    """Return the choices of a request as lm-eval sends it for log-likelihoods."""
    body = {
        "model": model,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    done: Any = api.post("/completions", body=body, cast_to=object)
    return sorted(done["choices"], key=lambda choice: choice["index"])


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_they_equal_a_bare_loop_beside_other_turns(
    api: openai.OpenAI, client: Client, models: Path, kind: str
) -> None:
    """The prompts share a prefix, which is cached, and run together, beside a stream."""
    shared = tokens_of(1, 100)
    prompts = [shared + tokens_of(seed, 60) for seed in (2, 3, 4)]
    with client.session(kind) as session, ThreadPoolExecutor(1) as pool:
        session.chat(prompts[0], options={"n-predict": 1})
        stream = session.stream([9, 8], options={"n-predict": 200, "ignore-eos": True})
        next(iter(stream))
        choices = request(api, kind, prompts)
        again = pool.submit(request, api, kind, prompts[:1]).result()
        del stream
    for choice, tokens in zip([*choices, *again], [*prompts, prompts[0]], strict=True):
        logprobs = choice["logprobs"]
        found, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
        wanted = bare_logprobs(models / f"{kind}.gguf", tokens)
        assert len(found) == len(tokens) + 1 and found[0] is None and tops[0] is None
        values = [wanted[i][token] for i, token in enumerate(tokens[1:])]
        assert found[1:-1] == pytest.approx(values, abs=NOISE_MAX)
        best = [wanted[i].max() for i in range(len(tokens))]
        assert [max(top.values()) for top in tops[1:]] == pytest.approx(best, abs=NOISE_MAX)
        begin = len(shared)
        assert sum(found[begin:-1]) == pytest.approx(sum(values[begin - 1 :]), abs=0.02)
    assert len(wanted[0]) == VOCAB_SIZE


def test_the_true_continuation_is_the_most_probable(api: openai.OpenAI, client: Client) -> None:
    graph = client.load_by_name("smollm2")

    def tokens(text: str) -> list[int]:
        return client.tokenize(graph, text)

    questions = [
        ("The capital of France is", [" Paris", " Berlin", " banana"]),
        ("The sun rises in the east and sets in the", [" west", " north", " seven"]),
        ("Two plus two equals", [" four", " dog"]),
    ]
    for context, endings in questions:
        prefix = tokens(context)
        choices = request(api, "smollm2", [prefix + tokens(end) for end in endings])
        sums = [sum(choice["logprobs"]["token_logprobs"][len(prefix) : -1]) for choice in choices]
        assert sums[0] == max(sums), context


def test_texts_and_token_ids_have_the_same_logprobs_and_true_offsets(
    api: openai.OpenAI, client: Client
) -> None:
    text = "Zoë's naïve 🦙 says: 日本語 — hello"
    ids = client.tokenize(client.load_by_name("smollm2"), text)
    keywords: Any = {"model": "smollm2", "echo": True, "logprobs": 2, "max_tokens": 0}
    both = [api.completions.create(**keywords, prompt=prompt).choices[0] for prompt in (text, ids)]
    assert both[0].text == both[1].text == text
    assert both[0].logprobs == both[1].logprobs
    logprobs = both[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.text_offset
    assert len(logprobs.tokens) == len(ids)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
    assert any(token.startswith("bytes:") for token in logprobs.tokens)
