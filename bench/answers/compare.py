"""The answers of one chat template: parsed here and by llama-server, whole and cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from inferd.sessions.answers.calls import json_text
from tests.sessions.answers.answer_messages import MESSAGES, TOOLS
from tests.sessions.answers.written_answers import (
    USER,
    Parsed,
    Unwritable,
    WrittenAnswer,
    WrittenAnswers,
    canonical_text,
)

from .llama_parser import LlamaParser
from .results import Comparison, Difference, Right

CUTS = 8
"""Places at which an answer is cut off."""
THINKING = {"enable_thinking": True}
"""The argument that llama-server gives every template."""
VALUE_CHARACTERS = 90


def compare(answers: WrittenAnswers, parser: LlamaParser) -> Comparison:
    """Compare all answers of a template."""
    count, cut_count, found = 0, 0, list[Difference]()
    chat = {"template": answers.source, "messages": [USER], "tools": TOOLS, "texts": []}
    begun = parser.parse(chat)
    for name, message in MESSAGES.items():
        try:
            written = answers.written(message, arguments=THINKING)[0]
        except Unwritable:
            continue
        cuts = _cuts(written.text)
        texts = [*(written.text[:at] for at in cuts), written.text]
        reply = begun if "error" in begun else parser.parse({"texts": texts})
        count += 1
        cut_count += len(cuts)
        as_written = written.expected._replace(
            calls=tuple((name, json_text(arguments)) for name, arguments in message.calls)
        )
        for whole, right, why in _differences(answers, written, as_written, cuts, reply):
            found.append(Difference(answers.name, name, whole, right, why))
    return Comparison(count, cut_count, found)


def _cuts(text: str) -> list[int]:
    places = range(1, len(text))
    return list(places[:: max(1, -(-len(places) // CUTS))])


def _differences(
    answers: WrittenAnswers,
    written: WrittenAnswer,
    as_written: Parsed,
    cuts: list[int],
    reply: dict[str, Any],
) -> Iterator[tuple[bool, Right, str]]:
    """Yield the difference of the whole answer, and the first one of those cut off. The message
    *as_written* has the arguments in the order in which the template writes them.
    """
    own = answers.parse(written.prompt, [written.text])
    if "error" in reply:
        yield True, _right(own, None, written.expected), f"llama.cpp: {_shown(reply['error'])}"
        return
    *partial, last = reply["messages"]
    other = _parsed(last, whole=True)
    if own != other:
        yield True, _right(own, other, written.expected), _why(own, other, last)
    for at, message in zip(cuts, partial, strict=True):
        now = answers.parse_cut(written.prompt, written.text[:at])
        then = _parsed(message, whole=False)
        if then is None or not _agree(now, then):
            mine, theirs = _begins(now, as_written), _begins(then, as_written)
            rights: dict[tuple[bool, bool], Right] = {
                (True, True): "both",
                (True, False): "inferd",
                (False, True): "llama-server",
                (False, False): "neither",
            }
            why = _why(now, then, message)
            yield False, rights[mine, theirs], f"after {written.text[:at][-20:]!r}: {why}"
            return


def _parsed(message: dict[str, Any], *, whole: bool) -> Parsed | None:
    """Return llama-server's message, or None for its refusal of the answer."""
    if "error" in message:
        return None
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        calls.append((function["name"], canonical_text(arguments) if whole else arguments))
    content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
    return Parsed(content.strip(), reasoning.strip(), tuple(calls))


def _right(own: Parsed, other: Parsed | None, expected: Parsed) -> Right:
    if own == expected:
        return "inferd"
    return "llama-server" if other == expected else "neither"


def _begins(parsed: Parsed | None, whole: Parsed) -> bool:
    """Return whether a message can become the *whole* one by added text alone."""
    return parsed is not None and _extends(parsed, whole)


def _agree(one: Parsed, other: Parsed) -> bool:
    """Return whether one message has the text of the other and perhaps more: a parser may hold back
    text that could begin a mark.
    """
    texts = zip(one[:2], other[:2], strict=True)
    calls = zip(one.calls, other.calls, strict=False)
    return all(_overlap(a, b) for a, b in texts) and all(
        x[0] == y[0] and _overlap(_bare(x[1]), _bare(y[1])) for x, y in calls
    )


def _overlap(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _extends(part: Parsed, whole: Parsed) -> bool:
    return (
        whole.content.startswith(part.content)
        and whole.reasoning.startswith(part.reasoning)
        and len(part.calls) <= len(whole.calls)
        and _agree(part, whole)
    )


def _bare(arguments: str) -> str:
    """Return arguments without white space and closing brackets, which differ by their forms."""
    return "".join(arguments.split()).rstrip('}]"')


def _why(own: Parsed, other: Parsed | None, message: dict[str, Any]) -> str:
    if other is None:
        return f"llama-server refuses it: {_shown(message['error'])}"
    parts = []
    for name, mine, theirs in zip(Parsed._fields, own, other, strict=True):
        if mine != theirs:
            parts.append(f"{name} {_shown(mine)} here, {_shown(theirs)} there")
    return "; ".join(parts)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    short = text if len(text) <= VALUE_CHARACTERS else text[:VALUE_CHARACTERS] + "…"
    return json.dumps(short, ensure_ascii=False) if isinstance(value, str) else short
