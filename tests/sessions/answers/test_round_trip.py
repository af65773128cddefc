"""Answers that chat templates write give their messages back, however they are cut into pieces.

The templates are those that llama.cpp tests. Each run has a third of the messages for a template,
in turn; `make answers` has all of them, and every place to cut a text into two.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.backends.llama.test_template_forms import templates
from tests.sessions.answers.answer_messages import MESSAGES, AnswerMessage
from tests.sessions.answers.written_answers import (
    Unwritable,
    WrittenAnswer,
    WrittenAnswers,
    answer_text,
    failures,
    splits,
)

SPLITS_MAX = 6
"""Places at which a text is cut into two, unless all are tried."""
PARTS = 3

_BESIDE = "the template writes text beside a call as reasoning"
EXCEPTIONS: dict[str, dict[str, str]] = {
    "LFM2.5-8B-A1B": {"quoted-argument": "the template escapes no quotes and backslashes"},
    "openai-gpt-oss-120b": dict.fromkeys(
        ("reasoning-text-call", "text-before", "lines-before"), _BESIDE
    ),
}
"""By template and message, the reason why the message is not given back."""
UNWRITABLE = {
    "meetkai-functionary-medium-v3.2": {"none": "an empty answer is not what the prompt requests"},
    "mistralai-Ministral-3-14B-Reasoning-2512": {"none": "the template refuses an empty answer"},
}
"""By template and message, the reason why there is no text of the message."""


@cache
def answers_of(template: Path) -> WrittenAnswers:
    return WrittenAnswers(template)


def chosen_messages(number: int, *, all_of_them: bool) -> dict[str, AnswerMessage]:
    """Return the messages for the template of this number."""
    step = 1 if all_of_them else PARTS
    return dict(list(MESSAGES.items())[number % step :: step])


@pytest.mark.parametrize(
    ("number", "template"), list(enumerate(templates())), ids=[p.stem for p in templates()]
)
def test_a_written_answer_gives_its_message_back(
    number: int, template: Path, request: pytest.FixtureRequest
) -> None:
    all_of_them = bool(request.config.getoption("--all-answers"))
    answers, known = answers_of(template), EXCEPTIONS.get(template.stem, {})
    found: dict[str, list[str]] = {}
    for name, message in chosen_messages(number, all_of_them=all_of_them).items():
        try:
            differences = failures(answers, message, 0 if all_of_them else SPLITS_MAX)
        except Unwritable as exc:
            if not exc.expected and name not in UNWRITABLE.get(template.stem, {}):
                found[name] = [str(exc)]
            continue
        if bool(differences) != (name in known):
            found[name] = differences or [f"it is given back now; known was: {known[name]}"]

    assert not found, "\n".join(f"{name}: {text}" for name, each in found.items() for text in each)


def test_every_third_of_the_messages_is_chosen_in_turn() -> None:
    thirds = [set(chosen_messages(number, all_of_them=False)) for number in range(PARTS)]

    assert set.union(*thirds) == set(MESSAGES)
    assert sum(map(len, thirds)) == len(MESSAGES)


def test_a_text_is_cut_at_every_place_or_at_some() -> None:
    assert list(splits("abc", 0)) == [("abc",), ("a", "b", "c"), ("a", "bc"), ("ab", "c")]
    assert len(list(splits("a" * 100, 6))) <= 2 + 6


def test_a_block_that_the_prompt_opens_is_closed_at_once() -> None:
    assert answer_text("<a><think>\n", "<a>Rome") == "</think>Rome"
    assert answer_text("<a>", "<a>Rome") == "Rome"
    assert answer_text("<a><think>\n", "<a><think></think>Rome") == "</think>Rome"
    assert answer_text("<a>x", "<a>Rome") is None


def test_a_message_that_is_not_given_back_is_seen() -> None:
    template = next(path for path in templates() if "Qwen3-0.6B" in path.stem)
    answers = answers_of(template)
    [written, *_] = answers.written(MESSAGES["call"])

    parsed = answers.parse(written.prompt, [written.text.replace("Rome", "Oslo")])

    assert parsed != written.expected
    assert isinstance(written, WrittenAnswer)
