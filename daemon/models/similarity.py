"""Sentences compared with a text by the embeddings of a model that is loaded (`stop-similarity`).

Nothing is loaded for it and nobody waits long: a comparison that cannot be made now is not made,
and the turn goes on, told why.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import anyio

from ...backends.errors import InferdError, ModelNotFound, UnsupportedOperation
from ...backends.params import BY_NAME
from ...sessions import Ledger, Parameters, Session, SessionSettings, TurnOptions
from ...sessions.turns.sentence_checks import Comparison, Similarity
from ..residency.gate import GateRequest
from ..traces.current_request import clear_current_request
from ..workers.process_client import ProcessClient
from .lease import Lease
from .model import ManagedModel, ModelState
from .registry import Registry

TEXTS_KNOWN_MAX = 64
"""Texts whose embeddings are remembered: those that sentences are compared with."""
MODEL, WAIT_MS = "similarity-model", "similarity-wait-ms"
Tell = Callable[[Similarity], None]


class _LoadedLease(Lease):
    """A lease on a model as long as it is loaded; the model is never loaded for this."""

    async def ready(self, on_progress: Callable[[float], None] | None = None) -> ProcessClient:
        """Return the client of a loaded model's worker; wait for one that replaces a dead worker.

        :raises ModelNotFound: the model is not loaded.
        """
        is_coming = self.model.state is ModelState.LOADING or len(self.model.recovery)
        if self.loaded is None and not is_coming:
            raise ModelNotFound(f"the model {self.name!r} is not loaded")
        return await super().ready(on_progress)


class _Embedding(NamedTuple):
    """A text's vector, of length 1, and the fingerprint of the model that made it."""

    vector: array[float]
    fingerprint: str


class EmbeddingComparer:
    """Compares sentences by embeddings: a `SentenceComparer`. Lives on the daemon's event loop.

    Its sessions are in *passing* while they last.
    """

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        new_handle: Callable[[], int],
        passing: set[Session],
    ):
        self._registry, self._ledger = registry, ledger
        self._new_handle, self._passing = new_handle, passing
        self._known: OrderedDict[tuple[Any, ...], _Embedding] = OrderedDict()

    def compare(self, model: ManagedModel, comparison: Comparison, tell: Tell) -> None:
        """Compare a sentence of *model*'s output, and pass the result to *tell* in any case."""
        options = model.options()
        name = options.get(MODEL, "")
        wait_s = options.get(WAIT_MS, BY_NAME[WAIT_MS].default) / 1000
        if name:
            self._registry.start_soon(self._compare, name, wait_s, comparison, tell)
        else:
            tell(Similarity(None, f"the configuration names no {MODEL}"))

    async def _compare(self, name: str, wait_s: float, comparison: Comparison, tell: Tell) -> None:
        clear_current_request()  # a worker's reports have the context of the request that loaded it
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
        lease = _LoadedLease(self._registry.catalog.get(name, comparison.owner))
        try:
            worker = await lease.ready()
            request = GateRequest(self._registry.seconds(), comparison.priority)
            with self._registry.gate.try_admit(lease.model, request) as is_admitted:
                if not is_admitted:
                    return Similarity(None, f"others wait for the memory of {name!r}")
                given = await self._given(lease, worker.info.fingerprint, comparison)
                said = await self._embedding(lease, comparison, comparison.sentence)
        finally:
            lease.close()
        if given.fingerprint != said.fingerprint:
            return Similarity(None, f"{name!r} was exchanged meanwhile")
        return Similarity(cosine_of(given.vector, said.vector))

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
        options = {"embedding": True, "embd-normalize": 2, "pooling": _pooling(lease.model)}
        session = Session(
            self._new_handle(),
            comparison.owner,
            lease,
            self._ledger,
            SessionSettings(Parameters(options)),
        )
        self._passing.add(session)
        try:
            await session.input.set_input(text.encode())
            turn = await session.runner.start_turn(
                TurnOptions(priority=comparison.priority, embeds=True)
            )
            await session.runner.finish_turn(turn)
        finally:
            self._passing.discard(session)
        told = turn.embedding
        if told is None or told.pooling == "rank":
            raise UnsupportedOperation(f"the model {lease.name!r} makes no embeddings, but ranks")
        vector = array("f")
        vector.frombytes(told.vectors)
        return _Embedding(vector, turn.client.info.fingerprint)


def cosine_of(one: array[float], other: array[float]) -> float:
    """Return the cosine of two vectors of length 1; of one without a direction 0."""
    return math.fsum(map(operator.mul, one, other))


def _pooling(model: ManagedModel) -> str:
    """Return the pooling that is configured for a model, if it makes one vector of a text."""
    pooling = model.options().get("pooling", "")
    return "" if pooling == "none" else str(pooling)


def not_chosen(asked: Mapping[str, Any], configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in force of what is the configuration's alone, where others were asked
    for.
    """
    force = {name: configured.get(name, BY_NAME[name].default) for name in (MODEL, WAIT_MS)}
    return {name: value for name, value in force.items() if asked.get(name, value) != value}
