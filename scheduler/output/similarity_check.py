"""Checks outside the engine whether a task ends with its last sentence (`stop-similarity`).

The task computes nothing meanwhile, so that nothing need be undone. Like a task whose reader is
away, it gives its slot to a task that needs it.
"""

from __future__ import annotations

from .. import messages as m
from ..task import Task
from .stopping import Ending
from .stopping.sentences import Sentences


def request_check(task: Task, ending: Ending | None, now: float) -> m.SentenceEnded:
    """Have *task* wait; *ending* is that of its last token, unless the sentence ends it."""
    sentence = task.text.pending_sentence
    assert sentence is not None
    task.checking_since, task.ending = now, ending
    return m.SentenceEnded(task.spec.id, sentence.end, sentence.text)


def awaits_verdict(task: Task, verdict: m.Verdict) -> bool:
    """Return whether *task* waits for this verdict: a repeated request has two."""
    sentence = task.text.pending_sentence
    return task.checking and sentence is not None and sentence.end == verdict.end


def end_check(task: Task, verdict: m.Verdict) -> Ending | None:
    """End the wait of *task*; return its ending, if it has met one."""
    ending, task.ending, task.checking_since = task.ending, None, None
    if verdict.detail:
        task.text.stop_at_sentence()
        return Ending(Sentences.reason, verdict.detail)
    return task.text.continue_text().ending or ending
