"""Comparison of sentences with a text by the embeddings of a loaded model (`stop-similarity`).

A comparison loads no model and has a short timeout. A turn whose comparison fails continues, and
gets the reason.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from typing import Any, NamedTuple

import anyio

from ...backends.errors import InferdError, ModelNotFound, UnsupportedOperation
from ...backends.params import BY_NAME
from ...backends.recent_dict import RecentDict
from ...sessions import Ledger, Parameters, Session, SessionSettings, TurnOptions
from ...sessions.worker_client import Comparison, Similarity
from ..residency.residency import ResidencyRequest
from ..traces.spans import clear_current_request
from ..workers.process_client import ProcessClient
from .model import ManagedModel, ModelState
from .registry import Lease, Registry, Report

REFERENCES_MAX = 64
"""Reference texts whose embeddings are stored; sentences are compared with them."""
MODEL_PARAMETER, WAIT_PARAMETER = "similarity-model", "similarity-wait-ms"


class _LoadedLease(Lease):
    """A lease on a loaded model. It never loads the model."""

    async def ready(self, on_progress: Callable[[float], None] | None = None) -> ProcessClient:
        """Return the client of a loaded model's worker, or wait for a load that is under way.

        :raises ModelNotFound: the model is not loaded.
        """
        is_loading = self.model.state is ModelState.LOADING or len(self.model.recovery)
        if self.loaded is None and not is_loading:
            raise ModelNotFound(f"the model {self.name!r} is not loaded")
        return await super().ready(on_progress)


class _Embedding(NamedTuple):
    """A text's vector, of length 1, and the fingerprint of its model."""

    vector: array[float]
    fingerprint: str


class EmbeddingComparer:
    """Compares sentences by embeddings. Lives on the daemon's event loop.

    Each embedding is a turn of a session of its own, which is in *one_turn_sessions* meanwhile.
    """

    def __init__(
        self,
        ledger: Ledger,
        new_handle: Callable[[], int],
        one_turn_sessions: set[Session],
    ):
        self._ledger = ledger
        self._new_handle, self._one_turn_sessions = new_handle, one_turn_sessions
        self._references = RecentDict[tuple[Any, ...], _Embedding](REFERENCES_MAX)

    def compare(
        self, registry: Registry, model: ManagedModel, comparison: Comparison, report: Report
    ) -> None:
        """Compare a sentence of *model*'s output. *report* gets the result or a reason."""
        options = model.options()
        name = options.get(MODEL_PARAMETER, "")
        wait_s = options.get(WAIT_PARAMETER, BY_NAME[WAIT_PARAMETER].default) / 1000
        if name:
            registry.start_soon(self._compare, registry, name, wait_s, comparison, report)
        else:
            report(Similarity(None, f"the configuration names no {MODEL_PARAMETER}"))

    async def _compare(
        self, registry: Registry, name: str, wait_s: float, comparison: Comparison, report: Report
    ) -> None:
        clear_current_request()  # the task has inherited the request that loaded the worker
        found = Similarity(None, f"{name!r} did not answer within {wait_s:g} s")
        try:
            with anyio.move_on_after(wait_s):
                found = await self._similarity(registry, name, comparison)
        except InferdError as exc:
            found = Similarity(None, exc.message)
        except BaseException:
            found = Similarity(None, f"the comparison by {name!r} failed: see the daemon's log")
            raise
        finally:
            report(found)

    async def _similarity(
        self, registry: Registry, name: str, comparison: Comparison
    ) -> Similarity:
        """Return how similar the texts are, by the embeddings of the model *name*.

        :raises InferdError: a text cannot be embedded now.
        """
        model = registry.catalog.get(name, comparison.owner.user)
        with closing(_LoadedLease(registry, model)) as lease:
            fingerprint = (await lease.ready()).info.fingerprint
            request = ResidencyRequest(comparison.priority, registry.seconds())
            with registry.loader.try_admit(model, request) as is_admitted:
                if not is_admitted:
                    return Similarity(None, f"other models wait for the memory of {name!r}")
                reference = await self._reference_embedding(lease, fingerprint, comparison)
                sentence = await self._embedding(lease, comparison, comparison.sentence)
        if reference.fingerprint != sentence.fingerprint:
            return Similarity(None, f"{name!r} was swapped meanwhile")
        return Similarity(cosine_of(reference.vector, sentence.vector))

    async def _reference_embedding(
        self, lease: Lease, fingerprint: str, comparison: Comparison
    ) -> _Embedding:
        """Return the embedding of the reference text; embeddings are stored for each user."""
        digest = sha256(comparison.text.encode()).digest()  # the text may be long
        key = comparison.owner.user, _pooling(lease.model), digest
        found = self._references.get((fingerprint, *key))
        if found is None:
            found = await self._embedding(lease, comparison, comparison.text)
        # A swap may have changed the fingerprint.
        self._references[(found.fingerprint, *key)] = found
        return found

    async def _embedding(self, lease: Lease, comparison: Comparison, text: str) -> _Embedding:
        """Embed a text in a turn of a new session of the same user."""
        options = {"embedding": True, "embd-normalize": 2, "pooling": _pooling(lease.model)}
        settings = SessionSettings(Parameters(options))
        session = Session(self._new_handle(), comparison.owner, lease, self._ledger, settings)
        self._one_turn_sessions.add(session)
        try:
            await session.set_input(text.encode())
            turn_options = TurnOptions(priority=comparison.priority, embeds=True)
            turn = await session.start_turn(turn_options)
            await session.finish_turn(turn)
        finally:
            self._one_turn_sessions.discard(session)
        embedding = turn.embedding
        if embedding is None or embedding.pooling == "rank":
            raise UnsupportedOperation(f"{lease.name!r} ranks texts and makes no embeddings")
        vector = array("f")
        vector.frombytes(embedding.vectors)
        return _Embedding(vector, turn.client.info.fingerprint)


def cosine_of(one: array[float], other: array[float]) -> float:
    """Return the cosine of two vectors of length 1, or 0 if one is a zero vector."""
    return math.fsum(map(operator.mul, one, other))


def _pooling(model: ManagedModel) -> str:
    """Return the configured pooling of a model, or an empty text if that makes several vectors."""
    pooling = model.options().get("pooling", "")
    return "" if pooling == "none" else str(pooling)
