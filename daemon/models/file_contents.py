"""Contents of the models' files: the facts in their headers, the inputs and outputs of graphs, and
the files that hold no language model.

Threads read the files, because a file server may not answer. A file is read again after a change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import anyio

from ...backends import ENGINES, declared_tensors
from ...backends.errors import LoadFailed
from ...backends.gguf import FileFacts
from ...backends.gguf.facts import OtherContent, other_content, read_facts
from ...backends.gguf.header import DamagedHeader
from ...backends.tensors import DeclaredTensors
from ...ipc.server.descriptors import BlockingThread
from .model_files import Signature, signature_of

HEADER_S_MAX = 5.0
"""The longest wait for a file's header."""
MODELS_MAX = 1000
"""Models whose facts are kept."""


F = TypeVar("F")


class FactsCache(Generic[F]):
    """The facts by the models' files, which *read* returns. Owned by the daemon's event loop."""

    def __init__(self, read: Callable[[Sequence[Path]], F]) -> None:
        self._read = read
        self._thread = BlockingThread("model-headers")
        self._by_files: dict[tuple[Path, ...], tuple[Signature, Future[F]]] = {}

    async def facts_of(self, files: Sequence[Path]) -> F:
        """Return the facts about the model in *files*.

        :raises LoadFailed: a file cannot be read, is damaged, or does not answer.
        """
        reading = asyncio.wrap_future(self._reading(tuple(files)))
        try:
            with anyio.fail_after(HEADER_S_MAX):
                return await asyncio.shield(reading)  # other callers may wait for it, too
        except TimeoutError:
            reason = f"no answer within {HEADER_S_MAX:g} s"
        except OSError as exc:
            reason = exc.strerror or str(exc)
        except DamagedHeader as exc:
            reason = str(exc)
        raise LoadFailed(f"{files[0].name} cannot be read: {reason}")

    def known_facts(self, files: Sequence[Path]) -> F | None:
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

    def _reading(self, files: tuple[Path, ...]) -> Future[F]:
        signature = signature_of(files)
        stored_for, reading = self._by_files.get(files, (None, None))
        if reading is not None and stored_for == signature:
            return reading
        self._by_files.pop(files, None)
        while len(self._by_files) >= MODELS_MAX:
            del self._by_files[next(iter(self._by_files))]
        reading = Future[F]()
        self._by_files[files] = signature, reading
        self._thread.submit(partial(self._read_header, files, reading))
        return reading

    def _read_header(self, files: Sequence[Path], reading: Future[F]) -> None:
        try:
            reading.set_result(self._read(files))
        except Exception as exc:  # it belongs to the callers that wait
            reading.set_exception(exc)


class FileFactsCache(FactsCache[FileFacts]):
    """The facts about language models."""

    def __init__(self) -> None:
        super().__init__(read_facts)


class DeclaredTensorsCache:
    """The inputs and outputs of graphs by their files, for each engine that reads them."""

    def __init__(self) -> None:
        self._caches = {
            name: FactsCache(partial(_read_declared, name))
            for name, engine in ENGINES.items()
            if engine.declared
        }

    async def tensors_of(self, backend: str, file: Path) -> DeclaredTensors | None:
        """Return the inputs and outputs of a graph, or None if they are known once it is loaded.

        :raises LoadFailed: the file cannot be read, is damaged, or does not answer.
        """
        cache = self._caches.get(backend)
        return None if cache is None else await cache.facts_of([file])


def _read_declared(backend: str, files: Sequence[Path]) -> DeclaredTensors | None:
    return declared_tensors(backend, files[0])


KINDS_S_MAX = 2.0
"""The longest wait for the files. If they are read later, later calls do not wait for them."""

_Contents = dict[Path, OtherContent | None]


class OtherContents:
    """The reasons why files are not language models. Owned by the daemon's event loop."""

    def __init__(self, thread: BlockingThread | None = None) -> None:
        self._thread = thread or BlockingThread("model-kinds")
        self._known: dict[Path, tuple[Signature, OtherContent | None]] = {}
        self._reading: Future[_Contents] | None = None
        self._signatures: dict[Path, Signature] = {}
        """Those of the files that are being read."""
        self._is_late = False

    def of_file(self, file: Path) -> OtherContent | None:
        """Return the reason, or None if the file is a model or was not read yet."""
        return self._known.get(file, ((), None))[1]

    async def read(self, files: Collection[Path]) -> None:
        """Read those *files* that have changed, and forget all others."""
        self._take_results()
        signatures = {file: signature_of([file]) for file in files}
        self._known = {file: known for file, known in self._known.items() if file in signatures}
        changed = {
            file: signature
            for file, signature in signatures.items()
            if self._known.get(file, (None,))[0] != signature
        }
        if changed and self._reading is None:
            self._reading, self._signatures, self._is_late = Future(), changed, False
            self._thread.submit(partial(_read_kinds, list(changed), self._reading))
        if self._reading is None or self._is_late:
            return
        with anyio.move_on_after(KINDS_S_MAX) as scope:
            await asyncio.shield(asyncio.wrap_future(self._reading))
        self._is_late = scope.cancelled_caught
        self._take_results()

    def _take_results(self) -> None:
        """Store the results of a reading that has ended."""
        if self._reading is not None and self._reading.done():
            reading, self._reading = self._reading, None
            contents = reading.result()
            self._known |= {file: (self._signatures[file], it) for file, it in contents.items()}


def _read_kinds(files: Sequence[Path], reading: Future[_Contents]) -> None:
    try:
        reading.set_result({file: other_content(file) for file in files})
    except Exception as exc:  # it belongs to the caller that waits
        reading.set_exception(exc)
