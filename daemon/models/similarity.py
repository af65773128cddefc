"""Sentences compared with a text by the embeddings of a model that is loaded (`stop-similarity`).

Nothing is loaded for it and nobody waits long: a comparison that cannot be made now is not made,
and the turn goes on, told why.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from ...backends.errors import InferdError, ModelNotFound, UnsupportedOperation
from ...backends.params import BY_NAME
from ...scheduler.priority import Priority
from ...sessions import Parameters, Session, SessionSettings, TurnOptions
from ...sessions.turns.sentence_checks import Comparison, Similarity
from ..residency.gate import Caller
from ..traces.requests import follow_none
from .model import Lease, Model, ModelState

if TYPE_CHECKING:
    from ..core import Daemon
    from ..workers.process_client import ProcessClient

__all__ = ("Comparing", "cosine_of", "not_chosen")

TEXTS_KNOWN_MAX = 64
"""Texts whose embeddings are remembered: those that sentences are compared with."""
MODEL, WAIT_MS = "similarity-model", "similarity-wait-ms"
Tell = Callable[[Similarity], None]


class _Loaded(Lease):
    """A lease on a model as long as it is loaded; it is never loaded for this."""

    async def ready(self, on_progress: Callable[[float], None] | None = None) -> ProcessClient:
        """Return the worker's client, if the model is loaded or its worker is being replaced.

        :raises ModelNotFound: it is not.
        """
        comes = self.model.state is ModelState.LOADING or len(self.model.recovery)
        if self.loaded is None and not comes:
            raise ModelNotFound(f"the model {self.name!r} is not loaded")
        return await super().ready(on_progress)


class _Embedding(NamedTuple):
    """A text's vector, of length 1, and the fingerprint of the model that made it."""

    vector: array[float]
    fingerprint: str


class Comparing:
    """Lives on the daemon's event loop."""

    def __init__(self, daemon: Daemon):
        self._daemon = daemon
        self._known: OrderedDict[tuple[Any, ...], _Embedding] = OrderedDict()

    def compare(self, model: Model, comparison: Comparison, tell: Tell) -> None:
        """Compare a sentence that *model* has said; *tell* hears what came out in any case."""
        options = model.options()
        name = options.get(MODEL, "")
        wait_s = options.get(WAIT_MS, BY_NAME[WAIT_MS].default) / 1000
        if name:
            self._daemon.registry.start_soon(self._compare, name, wait_s, comparison, tell)
        else:
            tell(Similarity(None, f"the configuration names no {MODEL}"))

    async def _compare(self, name: str, wait_s: float, comparison: Comparison, tell: Tell) -> None:
        follow_none()  # what a worker tells is heard in the request that had it loaded
        found = Similarity(None, f"{name!r} did not answer within {wait_s:g} s")
        try:
            with anyio.move_on_after(wait_s):
                found = await self._similarity(name, comparison)
        except InferdError as exc:
            found = Similarity(None, exc.message)
        except BaseException:
            found = Similarity(None, f"the comparison by {name!r} failed: see the daemon's log")
            raise
        finally:
            tell(found)

    async def _similarity(self, name: str, comparison: Comparison) -> Similarity:
        """Return how similar the texts are.

        :raises InferdError: one has no embedding now.
        """
        lease = _Loaded(self._daemon.registry.get(name, comparison.owner))
        try:
            worker = await lease.ready()
            with self._visit(lease.model, comparison.priority) as inside:
                if not inside:
                    return Similarity(None, f"others wait for the memory of {name!r}")
                given = await self._given(lease, worker.info.fingerprint, comparison)
                said = await self._embedding(lease, comparison, comparison.sentence)
        finally:
            lease.close()
        if given.fingerprint != said.fingerprint:
            return Similarity(None, f"{name!r} was exchanged meanwhile")
        return Similarity(cosine_of(given.vector, said.vector))

    @contextmanager
    def _visit(self, model: Model, priority: Priority) -> Iterator[bool]:
        """Enter a model if it lets a visit in at once; tell whether it does."""
        registry = self._daemon.registry
        visit = Caller(registry.seconds(), priority)
        try:
            if registry.room.loads_wait:
                model.stay.wait(visit, ())
                registry.turnstile.look()
            else:
                model.stay.enter(visit)
            yield visit in model.stay.inside
        finally:
            model.used_at = registry.seconds()
            model.stay.leave(visit, model.used_at)
            if registry.room.loads_wait:
                registry.turnstile.look()

    async def _given(self, lease: Lease, fingerprint: str, comparison: Comparison) -> _Embedding:
        """Return the embedding of the text that was given; a user's are remembered for himself."""
        about = comparison.owner, _pooling(lease.model), comparison.text
        found = self._known.pop((fingerprint, *about), None)
        if found is None:
            found = await self._embedding(lease, comparison, comparison.text)
        self._known[(found.fingerprint, *about)] = found  # the model may be another one by now
        if len(self._known) > TEXTS_KNOWN_MAX:
            self._known.popitem(last=False)
        return found

    async def _embedding(self, lease: Lease, comparison: Comparison, text: str) -> _Embedding:
        """Return a text's embedding: by a turn of a session of its own, of the same user."""
        daemon = self._daemon
        options = {"embedding": True, "embd-normalize": 2, "pooling": _pooling(lease.model)}
        session = Session(
            daemon.new_handle(),
            comparison.owner,
            lease,
            daemon.ledger,
            SessionSettings(Parameters(options)),
        )
        daemon.passing.add(session)
        try:
            await session.input.set_input(text.encode())
            turn = await session.runner.start_turn(
                TurnOptions(priority=comparison.priority, embeds=True)
            )
            await session.runner.finish_turn(turn)
        finally:
            daemon.passing.discard(session)
        told = turn.embedding
        if told is None or told.pooling == "rank":
            raise UnsupportedOperation(f"the model {lease.name!r} makes no embeddings, but ranks")
        vector = array("f")
        vector.frombytes(told.vectors)
        return _Embedding(vector, turn.client.info.fingerprint)


def cosine_of(one: array[float], other: array[float]) -> float:
    """Return the cosine of two vectors of length 1; of one without a direction 0."""
    return math.fsum(map(operator.mul, one, other))


def _pooling(model: Model) -> str:
    """Return the pooling that is configured for a model, if it makes one vector of a text."""
    pooling = model.options().get("pooling", "")
    return "" if pooling == "none" else str(pooling)


def not_chosen(asked: Mapping[str, Any], configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in force of what is the configuration's alone, where others were asked
    for.
    """
    force = {name: configured.get(name, BY_NAME[name].default) for name in (MODEL, WAIT_MS)}
    return {name: value for name, value in force.items() if asked.get(name, value) != value}
