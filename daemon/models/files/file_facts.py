"""Facts about the models' files, from their headers, as `show` returns them.

A thread reads the headers, because a file server may not answer. A file is read again after a
change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import anyio

from ....backends.errors import LoadFailed
from ....backends.gguf.facts import FileFacts, read_facts
from ....backends.gguf.header import DamagedHeader
from ....ipc.server.descriptors.blocking_thread import BlockingThread
from ...residency.model_files import Signature, signature_of

READ_S_MAX = 5.0
"""The longest wait for a file's header."""
MODELS_MAX = 1000
"""Models whose facts are kept."""


class FileFactsCache:
    """The facts by the models' files. Owned by the daemon's event loop."""

    def __init__(self) -> None:
        self._thread = BlockingThread("model-headers")
        self._by_files: dict[tuple[Path, ...], tuple[Signature, Future[FileFacts]]] = {}

    async def facts_of(self, files: Sequence[Path]) -> FileFacts:
        """Return the facts about the model in *files*.

        :raises LoadFailed: a file cannot be read, is damaged, or does not answer.
        """
        reading = asyncio.wrap_future(self._reading(tuple(files)))
        try:
            with anyio.fail_after(READ_S_MAX):
                return await asyncio.shield(reading)  # other callers may wait for it, too
        except TimeoutError:
            reason = f"no answer within {READ_S_MAX:g} s"
        except OSError as exc:
            reason = exc.strerror or str(exc)
        except DamagedHeader as exc:
            reason = str(exc)
        raise LoadFailed(f"{files[0].name} cannot be read: {reason}")

    def known_facts(self, files: Sequence[Path]) -> FileFacts | None:
        """Return the facts about the model in *files* if they were read already, without a wait.
        Otherwise begin to read them, unless another file is being read.
        """
        key = tuple(files)
        if not key:
            return None
        stored_for, reading = self._by_files.get(key, (None, None))
        if reading is None or stored_for != signature_of(files):
            if all(other.done() for _, other in self._by_files.values()):
                self._reading(key)
            return None
        if not reading.done() or reading.exception() is not None:
            return None
        return reading.result()

    def _reading(self, files: tuple[Path, ...]) -> Future[FileFacts]:
        signature = signature_of(files)
        stored_for, reading = self._by_files.get(files, (None, None))
        if reading is not None and stored_for == signature:
            return reading
        self._by_files.pop(files, None)
        while len(self._by_files) >= MODELS_MAX:
            del self._by_files[next(iter(self._by_files))]
        reading = Future()
        self._by_files[files] = signature, reading
        self._thread.submit(partial(_read, files, reading))
        return reading


def _read(files: Sequence[Path], reading: Future[FileFacts]) -> None:
    try:
        reading.set_result(read_facts(files))
    except Exception as exc:  # it belongs to the callers that wait
        reading.set_exception(exc)
