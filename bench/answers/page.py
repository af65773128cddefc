"""The page docs/models.md, made from the results of `make answers` alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tools.build_engine import ROOT

from .results import Difference, Results, Row, saved_results

__all__ = ("PAGE", "models_page")

PAGE = ROOT / "docs" / "models.md"
NAMES_MAX = 6
_CALL_CHARACTERS = 150

_HEAD = """\
# Models: chat templates, reasoning and tool calls

`make answers` measures what this page has, and `make docs` writes it. The templates are the {count}
that llama.cpp {engine} tests. A model works here as its template does, also under another name: the
form of answers is derived from the template in the model's file, and `inferd show MODEL` prints it.

The measurement: each template writes {messages} messages of an assistant (text, reasoning, calls
with nested, empty, non-ASCII and markup-like arguments, several calls, text beside calls). The text
between the prompt and the end of the answer is what the model writes. It must give the message
back, whole, in single characters, and cut into two at any place; only white space at its ends
may differ. The same texts, whole and cut off, go to llama-server's parser.

**{whole} of {count} templates give back every message that they write.**

## Templates

- *a call*: the text of a call of `weather` with `place` and `days`. A template without one writes
  no calls: they are sent to it as JSON in the text.
- *several*: several calls in one answer. *system*: a template without these messages gets their
  text in the first message of the user.
- *given back*: messages that the answer gives back, of those that the template writes.
- *again*: tokens of old turns that a program without a session makes the model compute again, in a
  loop of two calls, their results, an answer and another question: if it sends the reasoning of old
  answers back, and if it does not. The vocabulary is that of a small model.

| template | form | reasoning | a call | several | system | given back | again |
|---|---|---|---|---|---|---|---|"""

_LLAMA = """\
## Beside llama-server

llama-server's parser and this one read {answers} answers whole and {cuts} cut off. **{same} answers
give the same message, {cuts_same} of those cut off at any place.** A message that is cut off is the
same if one parser only holds back more of its end. *Right* is the parser whose message is the
template's.
"""


def models_page(results: Results | None = None) -> str:
    """Return the text of the page."""
    results = results or saved_results()
    return "\n".join([*_templates(results), *_exceptions(results), *_differences(results), ""])


def _templates(results: Results) -> Iterator[str]:
    whole = sum(row.facts.given_back == row.facts.messages for row in results.rows)
    yield _HEAD.format(
        count=len(results.rows),
        engine=results.engine,
        messages=max(row.facts.messages for row in results.rows),
        whole=whole,
    )
    yield from map(_row, results.rows)
    yield ""


def _row(row: Row) -> str:
    facts = row.facts
    cells = [
        facts.template,
        facts.form,
        _code(facts.reasoning),
        _code(_short(facts.call, _CALL_CHARACTERS)),
        _yes(facts.parallel),
        _yes(facts.system),
        f"{facts.given_back} of {facts.messages}",
        f"{facts.again[0]}, {facts.again[1]}",
    ]
    return f"| {' | '.join(cells)} |"


def _exceptions(results: Results) -> Iterator[str]:
    yield "## Messages that are not given back"
    yield ""
    yield "| template | messages | reason |"
    yield "|---|---|---|"
    for facts in (row.facts for row in results.rows):
        for reason in dict.fromkeys(facts.exceptions.values()):
            names = [name for name, why in facts.exceptions.items() if why == reason]
            yield f"| {facts.template} | {', '.join(names)} | {reason} |"
    yield ""
    yield "## Tokens that are computed again"
    yield ""
    yield "The templates that do not render old turns as they were written, by the reason:"
    yield ""
    for reason in dict.fromkeys(row.facts.why_again for row in results.rows):
        if reason:
            names = [row.facts.template for row in results.rows if row.facts.why_again == reason]
            yield f"- {reason}: {', '.join(names)}"
    yield ""


def _differences(results: Results) -> Iterator[str]:
    comparisons = [row.comparison for row in results.rows]
    all_of_them = [d for comparison in comparisons for d in comparison.differences]
    whole = sum(d.whole for d in all_of_them)
    answers, cuts = (
        sum(comparison.answers for comparison in comparisons),
        sum(comparison.cuts for comparison in comparisons),
    )
    yield _LLAMA.format(
        answers=answers,
        cuts=cuts,
        same=answers - whole,
        cuts_same=answers - (len(all_of_them) - whole),
    )
    yield "| right | answers whole | cut off |"
    yield "|---|---|---|"
    for right in ("inferd", "llama-server", "both", "neither"):
        chosen = [d for d in all_of_them if d.right == right]
        count = sum(d.whole for d in chosen)
        yield f"| {right} | {count} | {len(chosen) - count} |"
    yield ""
    yield (
        "`text-after` has text behind a call, which no template writes: here it is content. `null`"
        " is null for a parameter that may also be a text, and templates write it like the text."
    )
    yield ""
    yield "| template | messages | | right | difference in the first of them |"
    yield "|---|---|---|---|---|"
    yield from map(_difference, _groups(all_of_them))


def _groups(differences: Iterable[Difference]) -> list[list[Difference]]:
    """Return the differences of a template of one kind together."""
    found: dict[tuple[str, bool, str], list[Difference]] = {}
    for each in differences:
        found.setdefault((each.template, each.whole, each.right), []).append(each)
    return list(found.values())


def _difference(group: list[Difference]) -> str:
    first = group[0]
    names = ", ".join(each.message for each in group[:NAMES_MAX])
    if len(group) > NAMES_MAX:
        names += f" and {len(group) - NAMES_MAX} more"
    cells = [first.template, names, "whole" if first.whole else "cut off", first.right]
    return f"| {' | '.join([*cells, _code(first.why)])} |"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


def _code(text: str) -> str:
    """Return *text* as code in a cell of a table."""
    if not text:
        return ""
    shown = text.replace("\n", "⏎").replace("|", "\\|")
    return f"`` {shown} ``"
