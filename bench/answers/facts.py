"""Facts about one chat template: what it writes, and what a loop of requests computes again."""

from __future__ import annotations

from tests.sessions.answers.answer_messages import MESSAGES, AnswerMessage, call
from tests.sessions.answers.test_round_trip import EXCEPTIONS
from tests.sessions.answers.written_answers import Unwritable, WrittenAnswers, failures
from tests.sessions.history.stateless_loop import run_loop
from tests.sessions.history.test_stateless_loops import OTHERWISE

from .results import Facts
from .vocabulary import count_tokens

SPLITS = 16
_CALL = AnswerMessage(calls=(call("weather", place="Rome", days=2),))


async def facts_of(answers: WrittenAnswers) -> Facts:
    """Return the facts about a template."""
    written, exceptions = 0, dict[str, str]()
    for name, message in MESSAGES.items():
        try:
            different = failures(answers, message, SPLITS)
        except Unwritable:
            continue
        written += 1
        if different:
            exceptions[name] = EXCEPTIONS.get(answers.name, {}).get(name, different[0])
    kept, bare = [await run_loop(answers, reasoning=sent) for sent in (True, False)]
    return Facts(
        template=answers.name,
        form=answers.form_name,
        reasoning=answers.reasoning_marks,
        call=_call(answers),
        parallel=answers.form.calls != "none" and not answers.form.single_calls,
        system=answers.form.system,
        results=answers.form.results,
        messages=written,
        given_back=written - len(exceptions),
        exceptions=exceptions,
        again=(kept.tokens(count_tokens), bare.tokens(count_tokens)),
        why_again=OTHERWISE.get(answers.name, kept.why),
    )


def _call(answers: WrittenAnswers) -> str:
    try:
        return answers.written(_CALL)[0].text
    except Unwritable:
        return ""
