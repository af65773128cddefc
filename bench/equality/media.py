"""`python -m bench.equality.media`: images and sounds on both sides; writes docs/compare-media.md.

Each question is a chat message with one image or sound. Both sides get the same files of the model
and the projector, and the same bytes, and answer with the most probable tokens. The answers' tokens
and the logits of the most probable ones are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import ctypes
import json
import math
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llama_cpp import llama_cpp as lib

from bench import daemon, llama_server
from bench.__main__ import alone
from bench.equality.sides import post_json
from bench.machine import machine
from bench.pictures import png
from inferd import AsyncClient
from inferd.backends.llama.llama_log import capture
from inferd.backends.llama.loading.gguf_check import GgufFile, read_gguf
from tests.pictures import wav
from tests.tiny_projector import KINDS, TEXT_MODELS, write_pair, write_realistic
from tools.build_engine import ROOT
from tools.get_models import MODELS_DIR, SOURCES

JSON, PAGE = ROOT / "docs" / "compare-media.json", ROOT / "docs" / "compare-media.md"
CTX_SIZE, THREADS = 2048, 1
TOKENS, TOP_TOKENS = 16, 5
TOLERANCE = 1e-3
"""The most by which a logit may differ."""
TEXTS = ("What is it?", "Describe it.", "Is it large?", "What else?")
"""The texts of a question. The first one is used to whose answer llama-server reports tokens."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
"""The chat template of a base model, for which each side would use another one of its own."""
SIDES_OF_IMAGES = (24, 64, 96, 200)
SECONDS_OF_SOUNDS = (0.5, 3.0)
REALISTIC = {
    "realistic mlp": ("mlp", "smollm2", 576),
    "realistic gemma3": ("gemma3", "gemma3", 640),
}
"""The kind of a projector of realistic shape, its model, and the width of that model."""


class Question(msgspec.Struct, frozen=True):
    """A question about an image or a sound."""

    name: str
    kind: str
    data: bytes
    text: str = TEXTS[0]


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A token of an answer, with the logprobs of the most probable tokens at its place."""

    token: int
    top: dict[int, float]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one answer: whether its tokens are the same, and the largest difference of
    a logit of the tokens that both sides report.
    """

    model: str
    question: str
    tokens: int
    same: bool
    difference: float
    input_tokens: tuple[int, int]
    """inferd's number of input tokens, and llama-server's."""

    @property
    def equal(self) -> bool:
        """Whether both sides have answered alike."""
        return self.same and self.difference <= TOLERANCE and len(set(self.input_tokens)) == 1


class Answer(msgspec.Struct, frozen=True):
    """An answer: its tokens, and the number of input tokens."""

    steps: list[Step]
    input_tokens: int


def questions_of(kind: str, *, small: bool = False) -> list[Question]:
    """Return the questions for a kind of projector."""
    rng = random.Random(kind)
    if kind == "ultravox":
        return [Question(f"{s:g} s", "audio", wav(s)) for s in SECONDS_OF_SOUNDS]
    sides = SIDES_OF_IMAGES[:1] if small else SIDES_OF_IMAGES
    return [Question(f"{side} × {side}", "image", png(rng, side)) for side in sides]


def compared(model: str, question: Question, own: Answer, other: Answer) -> Row:
    """Return the row of two answers. llama-server reports no token that leaves a character
    incomplete, so its tokens may be only some of the answer's, in the same order.
    """
    difference = least_difference(own.steps, other.steps)
    same = bool(other.steps) and difference is not None
    return Row(
        model=model,
        question=question.name,
        tokens=len(own.steps),
        same=same,
        difference=difference or 0.0,
        input_tokens=(own.input_tokens, other.input_tokens),
    )


def least_difference(own: Sequence[Step], other: Sequence[Step]) -> float | None:
    """Return the largest difference of a logit between the steps of *other* and those of *own*
    with the same tokens in the same order, or None if there are none. Where a token is repeated,
    the choice of the least difference counts.
    """
    least = [0.0] * (len(own) + 1)
    """For the steps of *other* so far, by the number of the first steps of *own*."""
    for theirs in other:
        found = [math.inf]
        for before, mine in zip(least, own, strict=False):
            matched = max(before, _difference(mine, theirs))
            found.append(min(found[-1], matched))
        least = found
    return None if math.isinf(least[-1]) else least[-1]


def _difference(mine: Step, theirs: Step) -> float:
    """Return the largest difference of a logit, as its distance from that of the chosen token.

    The logprobs themselves have a further difference, the same for all tokens: llama-server sums
    the exponentials with 32 bits. For the 262 144 tokens of Gemma 3 that is wrong by about 1e-3.
    """
    if mine.token != theirs.token:
        return math.inf
    both = mine.top.keys() & theirs.top.keys()
    shift = mine.top[mine.token] - theirs.top[mine.token]
    return max(abs(mine.top[token] - theirs.top[token] - shift) for token in both)


def steps_of(probabilities: Sequence[Mapping[str, Any]]) -> list[Step]:
    """Return the steps of an answer, which both sides describe alike."""
    return [
        Step(
            token["id"],
            {top["id"]: top["logprob"] for top in (*token["top_logprobs"], token)},
        )
        for token in probabilities
    ]


@asynccontextmanager
async def inferd_side(model: Path, projector: Path, template: str) -> AsyncIterator[Any]:
    """Run a daemon and yield the function that asks it."""
    text = daemon.configuration(1, CTX_SIZE, {"models-dir": str(model.parent), "cores": THREADS})
    text += f'\n[models.m]\nfile = "{model}"\nmmproj = "{projector}"\nflash-attn = "off"\n'
    text += 'speculation = "off"\n'  # a step of one token has other noise than one of several
    text += 'cache-type-k = "f32"\ncache-type-v = "f32"\n'
    text += f"chat-template = {json.dumps(template)}\n" if template else ""
    async with daemon.running(text) as running, AsyncClient(running.socket) as client:

        async def ask(question: Question) -> Answer:
            parts = [
                {"type": question.kind, "data": question.data},
                {"type": "text", "text": question.text},
            ]
            options = {"temp": 0, "n-predict": TOKENS, "n-probs": TOP_TOKENS, "ignore-eos": True}
            async with client.session("m") as session:
                await session.chat([{"role": "user", "content": parts}], options=options)
                found = session.metadata
            return Answer(steps_of(found["completion_probabilities"]), found["input_tokens"])

        yield ask


@asynccontextmanager
async def llama_server_side(model: Path, projector: Path, template: str) -> AsyncIterator[Any]:
    """Run llama-server and yield the function that asks it."""
    flags = ["-t", str(THREADS), "-tb", str(THREADS), "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    flags += ["--mmproj", str(projector), *llama_server.NO_CACHES]
    flags += ["--chat-template", template] if template else []
    async with llama_server.running(1, CTX_SIZE, flags, model) as running:

        async def ask(question: Question) -> Answer:
            reply = await asyncio.to_thread(_post, running.port, question)
            choice = reply["choices"][0]
            reported = (choice.get("logprobs") or {}).get("content", [])
            return Answer(steps_of(reported), reply["usage"]["prompt_tokens"])

        yield ask


def _post(port: int, question: Question) -> dict[str, Any]:
    encoded = base64.b64encode(question.data).decode()
    part: dict[str, Any] = {
        "type": "input_audio",
        "input_audio": {"data": encoded, "format": "wav"},
    }
    if question.kind == "image":
        url = f"data:image/png;base64,{encoded}"
        part = {"type": "image_url", "image_url": {"url": url}}
    content = [part, {"type": "text", "text": question.text}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0, "samplers": ["temperature"], "max_tokens": TOKENS,
        "logprobs": True, "top_logprobs": TOP_TOKENS, "ignore_eos": True, "cache_prompt": False,
    }  # fmt: skip
    return post_json(port, "/v1/chat/completions", body)


async def reported(ask: Any, question: Question) -> tuple[Question, Answer]:
    """Return a *question* with a text to whose answer llama-server reports tokens, and the answer.
    It leaves out incomplete characters, of which the answer of a tiny model may consist.
    """
    for text in TEXTS:
        asked = msgspec.structs.replace(question, text=text)
        answer = await ask(asked)
        if answer.steps:
            break
    return asked, answer


def _header(model: Path) -> GgufFile:
    with model.open("rb") as file:
        return read_gguf(file.fileno(), model.name)


async def compare_model(
    name: str, kind: str, model: Path, projector: Path, *, small: bool = False
) -> list[Row]:
    """Return the rows of one model."""
    template = "" if "tokenizer.chat_template" in _header(model).values else CHATML
    async with llama_server_side(model, projector, template) as ask:
        others = [await reported(ask, question) for question in questions_of(kind, small=small)]
    async with inferd_side(model, projector, template) as ask:
        rows = [compared(name, asked, await ask(asked), other) for asked, other in others]
    for row in rows:
        print(
            f"{row.model:18} {row.question:10} {'same' if row.same else 'DIFFERENT':9}"
            f" {row.difference:.2e}  {row.input_tokens[0]} input tokens",
            flush=True,
        )
    return rows


def models(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, str, Path, Path]]:
    """Yield each model's name, its projector's kind, and both files."""
    for kind in KINDS:
        if not names or kind in names:
            yield (kind, kind, *write_pair(kind, folder))
    for name, (kind, source, width) in REALISTIC.items():
        if not names or name in names:
            model = write_unquantized(MODELS_DIR / SOURCES[source].file, folder)
            projector = write_realistic(kind, folder, width, matrices=np.float32)
            yield name, kind, model, projector


def write_unquantized(model: Path, folder: Path) -> Path:
    """Write a copy of a model with weights of 32 bits, whose logits do not depend on the shape of a
    batch.
    """
    path = folder / f"{model.stem}-F32.gguf"
    capture()  # llama.cpp logs each tensor
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = lib.LLAMA_FTYPE_ALL_F32, True
    if lib.llama_model_quantize(str(model).encode(), str(path).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp cannot write {path}")
    return path


class Comparison(msgspec.Struct, frozen=True):
    """All rows, and the facts about the machine."""

    facts: dict[str, str]
    rows: list[Row]

    def different(self) -> list[Row]:
        """Return the rows that are not equal."""
        return [row for row in self.rows if not row.equal]


def page(comparison: Comparison) -> str:
    """Return the text of the page."""
    facts, rows = comparison.facts, comparison.rows
    equal = len(rows) - len(comparison.different())
    tiny = ", ".join(f"`{kind}` ({TEXT_MODELS[kind]})" for kind in KINDS)
    about = (
        "Generated by `python -m bench.equality.media` from"
        " [compare-media.json](compare-media.json). Both servers are built from the same llama.cpp,"
        " read the same model and projector, and get the same bytes. The tiny models have random"
        f" weights: {tiny}. The projectors of realistic shape have about 100 M random weights, for"
        " SmolLM2 135M and Gemma 3 270M. All matrices of these have 32 bits, because the logits of"
        " quantized ones depend on the shape of a batch"
        " ([compare.md](compare.md#noise-of-the-batch-shape)). Answers are greedy, of"
        f" {TOKENS} tokens; the difference is the largest one of a logit, of the {TOP_TOKENS}"
        " most probable tokens at each place. Logprobs differ by a further number, which is the"
        " same for all tokens of a place: llama-server sums the probabilities with 32 bits, which"
        " for the 262 144 tokens of Gemma 3 is wrong by about 1e-3. Flash attention is off, because"
        " with it the embeddings of random weights depend on the number of threads."
    )
    where = (
        f"{facts['date']}, {facts['processor']}, {facts['cores']} cores, {facts['system']}, Python"
        f" {facts['python']}, llama-cpp-python {facts['llama-cpp-python']}; {THREADS} thread, one"
        " slot on each side."
    )
    counts = f"{equal} of {len(rows)} answers have the same tokens and logits"
    lines = [
        *("# Images and sounds beside llama-server: the same answers", "", about, "", where, ""),
        *(f"**{counts} within {TOLERANCE:g}.**", ""),
        "| projector | item | input tokens | tokens | largest difference |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        own, other = row.input_tokens
        shown = str(own) if own == other else f"{own}, llama-server {other}"
        same = "the same" if row.same else "**different**"
        lines.append(f"| {row.model} | {row.question} | {shown} | {same} | {row.difference:.1e} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Read the command line, ask both sides, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[], help="only these; writes nothing")
    parser.add_argument("--small", action="store_true", help="one image each; writes nothing")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with alone(), tempfile.TemporaryDirectory() as folder:
        llama_server.binary()
        for name, kind, model, projector in models(Path(folder), arguments.models):
            comparing = compare_model(name, kind, model, projector, small=arguments.small)
            rows += asyncio.run(comparing)
    comparison = Comparison(machine(), rows)
    if not (arguments.models or arguments.small):
        JSON.write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=1) + b"\n")
        PAGE.write_text(page(comparison))
    different = comparison.different()
    print(f"{len(rows) - len(different)} of {len(rows)} answers are equal")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
