"""Files of the models directory that hold no language models, by their beginnings.

A thread reads the files, because a file server may not answer. A file is read again after a change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import anyio

from ....backends.gguf.kinds import OtherContent, other_content
from ....ipc.server.descriptors.blocking_thread import BlockingThread
from ...residency.model_files import Signature, signature_of

READ_S_MAX = 2.0
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
            self._thread.submit(partial(_read, list(changed), self._reading))
        if self._reading is None or self._is_late:
            return
        with anyio.move_on_after(READ_S_MAX) as scope:
            await asyncio.shield(asyncio.wrap_future(self._reading))
        self._is_late = scope.cancelled_caught
        self._take_results()

    def _take_results(self) -> None:
        """Store the results of a reading that has ended."""
        if self._reading is not None and self._reading.done():
            reading, self._reading = self._reading, None
            contents = reading.result()
            self._known |= {file: (self._signatures[file], it) for file, it in contents.items()}


def _read(files: Sequence[Path], reading: Future[_Contents]) -> None:
    try:
        reading.set_result({file: other_content(file) for file in files})
    except Exception as exc:  # it belongs to the caller that waits
        reading.set_exception(exc)
