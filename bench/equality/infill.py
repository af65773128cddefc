"""`python -m bench.equality.infill`: text between two others on both sides; writes
docs/compare-infill.md.

Both sides read the same file, a copy of SmolLM2 with tokens to fill in the middle, and get the same
texts. Its weights have 32 bits, so that the answers do not depend on the shapes of batches.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench import daemon, llama_server
from bench.equality.media import write_unquantized
from bench.equality.sides import post_json
from bench.fim_model import MARKS, write_fim
from bench.machine import machine
from inferd import AsyncClient, Infill
from tools.build_engine import ROOT

JSON, PAGE = ROOT / "docs" / "compare-infill.json", ROOT / "docs" / "compare-infill.md"
CTX_SIZE, THREADS = 2560, 2
TOKENS = 16
OPTIONS = {"temperature": 0, "n_predict": TOKENS, "ignore_eos": True}
_PREFIX = 'def area(width, height):\n    """Return the area of a rectangle."""\n    return '
_SUFFIX = "\n\n\nprint(area(3, 4))\n"
_UNITS = 'METRE = "m"\nFOOT = "ft"\n'
_LINES = "".join(f"value_{number} = {number * number}\n" for number in range(80))
CASES: dict[str, Infill] = {
    "a function": Infill(prefix=_PREFIX, suffix=_SUFFIX),
    "typed text": Infill(prefix=_PREFIX, suffix=_SUFFIX, typed="width *"),
    "no suffix": Infill(prefix=_PREFIX, suffix=""),
    "no prefix": Infill(prefix="", suffix=_SUFFIX),
    "no texts": Infill(prefix="", suffix=""),
    "parts of two files": Infill(
        prefix=_PREFIX,
        suffix=_SUFFIX,
        extra=[{"name": "units.py", "text": _UNITS}, {"text": "PI = 3.14\n"}],
    ),
    "parts that are too long": Infill(
        prefix=_PREFIX, suffix=_SUFFIX, extra=[{"name": "values.py", "text": _LINES}] * 2
    ),
    "a suffix that is too long": Infill(prefix=_PREFIX, suffix=_SUFFIX + _LINES),
    "names of special tokens": Infill(
        prefix=f"# <|im_end|> {MARKS['mid']}\n", suffix=f"# {MARKS['pre']} <|im_start|>\n"
    ),
    "other scripts": Infill(prefix="Größe: 本 и 🙂 ", suffix=" – Ende, конец, 終\n"),
}


class Filled(msgspec.Struct, frozen=True):
    """An answer: its text, its tokens, and the number of input tokens."""

    text: str
    tokens: list[int]
    input_tokens: int


class Row(msgspec.Struct, frozen=True):
    """The answers of both sides, inferd's first."""

    case: str
    suffix_first: bool
    answers: tuple[Filled, Filled]

    @property
    def equal(self) -> bool:
        """Whether both sides have answered alike."""
        own, other = self.answers
        return bool(own.tokens) and own == other


class Comparison(msgspec.Struct, frozen=True):
    """All rows, and the facts about the machine."""

    facts: dict[str, str]
    rows: list[Row]


def places(*, suffix_first: bool) -> list[Infill]:
    """Return the places of all cases, with one order of prefix and suffix."""
    return [msgspec.structs.replace(place, suffix_first=suffix_first) for place in CASES.values()]


async def inferd_answers(model: Path, asked: Iterable[Infill]) -> list[Filled]:
    """Return the answers of a daemon, each in a session of its own."""
    text = daemon.configuration(1, CTX_SIZE, {"models-dir": str(model.parent), "cores": THREADS})
    text += f'\n[models.m]\nfile = "{model}"\nflash-attn = "off"\nspeculation = "off"\n'
    text += 'cache-type-k = "f32"\ncache-type-v = "f32"\n'
    found = []
    async with daemon.running(text) as running, AsyncClient(running.socket) as client:
        for place in asked:
            async with client.session("m") as session:
                async with session.stream(place, options=OPTIONS) as stream:
                    answer = "".join([piece async for piece in stream])
                tokens = int(session.metadata["input_tokens"])
                found.append(Filled(answer, list(stream.tokens), tokens))
    return found


async def llama_server_answers(
    model: Path, asked: Iterable[Infill], *, suffix_first: bool
) -> list[Filled]:
    """Return the answers of llama-server. It has the number of answer tokens as a flag too, by
    which it computes the budget of the parts of other files.
    """
    flags = ["-t", str(THREADS), "-tb", str(THREADS), "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    flags += ["-n", str(TOKENS), *llama_server.NO_CACHES, *["--spm-infill"] * suffix_first]
    async with llama_server.running(1, CTX_SIZE, flags, model) as running:
        replies = [
            await asyncio.to_thread(post_json, running.port, "/infill", _body(place))
            for place in asked
        ]
    return [Filled(r["content"], r["tokens"], r["tokens_evaluated"]) for r in replies]


def _body(place: Infill) -> Mapping[str, Any]:
    extra = [
        {"filename": part["name"], "text": part["text"]} if "name" in part else part
        for part in place.extra
    ]
    return {
        **OPTIONS,
        "input_prefix": place.prefix,
        "input_suffix": place.suffix,
        "prompt": place.typed,
        "input_extra": extra,
        "samplers": ["temperature"],
        "cache_prompt": False,
        "return_tokens": True,
    }


async def compare(model: Path) -> list[Row]:
    """Return the rows of both orders."""
    rows = []
    for suffix_first in (False, True):
        asked = places(suffix_first=suffix_first)
        own = await inferd_answers(model, asked)
        other = await llama_server_answers(model, asked, suffix_first=suffix_first)
        rows += [
            Row(case, suffix_first, answers)
            for case, answers in zip(CASES, zip(own, other, strict=True), strict=True)
        ]
    for row in rows:
        mine, theirs = row.answers
        print(
            f"{row.case:26} {row.suffix_first!s:5} {row.equal!s:5}"
            f" {mine.input_tokens}, {theirs.input_tokens}  {mine.text!r} {theirs.text!r}"
        )
    return rows


def page(comparison: Comparison) -> str:
    """Return the text of the page."""
    facts, rows = comparison.facts, comparison.rows
    marks = ", ".join(f"`{text}`" for text in MARKS.values())
    about = (
        "Generated by `python -m bench.equality.infill` from"
        " [compare-infill.json](compare-infill.json). Both servers are built from the same"
        " llama.cpp and read the same file: SmolLM2-135M-Instruct with weights of 32 bits, whose"
        f" unused control tokens {marks} are those to fill in the middle. It was not trained for"
        " that, so the answers show the equality of prompts and not the quality of a model. They"
        f" are greedy, of {TOKENS} tokens, without speculation and flash attention. llama-server"
        " has the order with the suffix first by `--spm-infill`."
    )
    where = (
        f"{facts['date']}, {facts['processor']}, {facts['cores']} cores, {facts['system']}, Python"
        f" {facts['python']}, llama-cpp-python {facts['llama-cpp-python']}; {THREADS} threads, one"
        " slot on each side."
    )
    equal = sum(row.equal for row in rows)
    difference = (
        "The prompts differ in one case, on purpose: of a prefix with more than 1536 tokens"
        " llama-server takes the last 1536, and inferd begins at a multiple of 256 tokens, so that"
        " the prompts begin alike while somebody types"
        " ([protocol.md](protocol.md#text-to-fill-in))."
    )
    return "\n".join(
        [
            *("# Text between two others beside llama-server: the same answers", "", about, ""),
            *(where, "", f"**{equal} of {len(rows)} answers have the same text and tokens.**", ""),
            *(difference, ""),
            "| case | order | input tokens | answer |",
            "|---|---|---|---|",
            *map(_line, rows),
            "",
        ]
    )


def _line(row: Row) -> str:
    own, other = row.answers
    tokens = str(own.input_tokens)
    if own.input_tokens != other.input_tokens:
        tokens += f", llama-server {other.input_tokens}"
    order = "suffix first" if row.suffix_first else "prefix first"
    return f"| {row.case} | {order} | {tokens} | {'the same' if row.equal else '**different**'} |"


def load() -> Comparison:
    """Return the saved comparison."""
    return msgspec.json.decode(JSON.read_bytes(), type=Comparison)


def main() -> None:
    """Fill in the texts on both sides, and write the page."""
    llama_server.binary()
    with tempfile.TemporaryDirectory() as folder:  # no times are measured
        original = write_fim(Path(folder))
        model = write_unquantized(original, Path(folder))
        original.unlink()
        rows = asyncio.run(compare(model))
    comparison = Comparison(machine(), rows)
    JSON.write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=1) + b"\n")
    PAGE.write_text(page(comparison))
    if not all(row.equal for row in rows):
        sys.exit("some answers differ")


if __name__ == "__main__":
    main()
