"""A task that waits: others say whether it ends with its last sentence (`stop-similarity`).

It computes nothing meanwhile, so nothing need be taken back; like one whose reader is away it gives
its slot to a task that needs it.
"""

from __future__ import annotations

from .. import messages as m
from ..task import Task
from .stopping import Ending
from .stopping.sentences import Sentences


def request_check(task: Task, ending: Ending | None, now: float) -> m.SentenceEnded:
    """Let *task* wait; *ending* is what its last token ends it by if the sentence does not."""
    sentence = task.text.question
    assert sentence is not None
    task.checking_since, task.ending = now, ending
    return m.SentenceEnded(task.spec.id, sentence.end, sentence.text)


def is_awaited(task: Task, verdict: m.Verdict) -> bool:
    """Tell whether *task* waits for this verdict: one that was asked for twice comes twice."""
    sentence = task.text.question
    return task.checking and sentence is not None and sentence.end == verdict.end


def end_check(task: Task, verdict: m.Verdict) -> Ending | None:
    """Let *task* wait no more; return its end, if it has met one."""
    ending, task.ending, task.checking_since = task.ending, None, None
    if verdict.detail:
        task.text.stop()
        return Ending(Sentences.reason, verdict.detail)
    return task.text.go_on().ending or ending
