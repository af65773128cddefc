"""A history whose model was swapped, and leaves while its text is asked."""

from __future__ import annotations

import pytest

from inferd.backends.errors import WorkerCrashed
from inferd.scheduler.owner import Owner, Requester
from inferd.sessions.history.history import History
from inferd.sessions.history.state import HistoryVocabulary
from inferd.sessions.worker_client import Predecessor
from tests.sessions.doubles import Harness, InProcessClient, Source

pytestmark = pytest.mark.asyncio


class Leaving:
    """A model that is no longer loaded when it is used, unless it *stays*."""

    def __init__(self, source: Swapped, *, stays: bool):
        self._source, self._stays = source, stays

    async def ready(self) -> InProcessClient:
        if not self._stays:
            self._source.before = None
        raise WorkerCrashed("it has left")


class Swapped(Source):
    """A lease on a name that another model had before."""

    def __init__(self, port: InProcessClient, *, stays: bool = False):
        super().__init__(port)
        self.before: Predecessor | None = Leaving(self, stays=stays)

    def predecessor(self, vocabulary: str) -> Predecessor | None:
        return self.before


def retokenizable() -> tuple[HistoryVocabulary, History]:
    """Return a history in the tokens of a model before, and its text, which was taken along."""
    vocabulary, past = HistoryVocabulary(vocab_hash="another"), History()
    past.append_tokens([1, 2, 3])
    vocabulary.saved_text = b"once"
    return vocabulary, past


async def test_what_was_taken_along_is_said_where_the_model_leaves_while_it_is_asked() -> None:
    port = Harness().port
    vocabulary, past = retokenizable()

    await vocabulary.retokenize(Swapped(port), port, past, Requester(Owner(0)))

    assert past.prompt == await port.tokenize(b"once", special=True, bos=True)


async def test_the_crash_of_a_predecessor_that_stays_is_raised() -> None:
    port = Harness().port
    vocabulary, past = retokenizable()

    with pytest.raises(WorkerCrashed, match="it has left"):
        await vocabulary.retokenize(Swapped(port, stays=True), port, past, Requester(Owner(0)))
