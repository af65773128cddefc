"""Files of models that are read part by part, for another daemon."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import anyio
import anyio.to_thread

from ....backends.errors import BackendError, Busy, InvalidArgument, UnsupportedOperation
from ....backends.split_gguf import PART
from ....ipc.messages import PART_BYTES
from ...residency.model_files import identity_of
from .owned_transfers import OwnedTransfers

EXPORTS_MAX = 4


def check_single_file(name: str, file: Path | None) -> Path:
    """Return the file of the model *name*.

    :raises UnsupportedOperation: it has none, or several.
    """
    if file is None:
        raise UnsupportedOperation(f"the model {name!r} has no file")
    if PART.fullmatch(file.name):
        raise UnsupportedOperation(
            f"the model {name!r} is split into several files",
            hint="merge the parts with `llama-gguf-split --merge`",
        )
    return file


class ModelExport:
    """A file that is being read. It is hashed on the way."""

    def __init__(self, file: Path, owner: object):
        self.owner = owner
        self.size = 0
        self._file = file
        self._descriptor = -1
        self._identity: tuple[int, ...] = ()
        self._offset = 0
        self._is_closed = False
        self._digest = hashlib.sha256()
        self.lock = anyio.Lock()
        """Held while a part is read."""

    async def read_part(self, offset: int) -> tuple[bytes, str]:
        """Return the part at *offset*, and with the last one the file's SHA-256.

        :raises InvalidArgument: it is not the next part.
        :raises BackendError: the file cannot be read, or has changed.
        """
        async with self.lock:
            if offset != self._offset or self._is_closed:
                raise InvalidArgument(
                    f"a part at {offset}, after {self._offset} bytes",
                    hint="read the parts in order, from 0 on",
                )
            return await anyio.to_thread.run_sync(self._read)

    def _read(self) -> tuple[bytes, str]:
        try:
            if self._descriptor < 0:
                self._open()
            data = os.pread(self._descriptor, PART_BYTES, self._offset)
            changed = identity_of(os.fstat(self._descriptor)) != self._identity
        except OSError as exc:
            raise BackendError(f"{self._file.name} cannot be read: {exc.strerror}") from None
        if changed or (not data and self._offset < self.size):
            raise BackendError(f"{self._file.name} has changed while it was read")
        self._digest.update(data)
        self._offset += len(data)
        return data, self._digest.hexdigest() if self._offset == self.size else ""

    def _open(self) -> None:
        self._descriptor = os.open(self._file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise BackendError(f"{self._file.name} is not a file")
        self._identity, self.size = identity_of(found), found.st_size

    async def close(self) -> None:
        """Close the file, after the part that is being read."""
        async with self.lock:
            self._is_closed = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


class ModelExports(OwnedTransfers[ModelExport]):
    """The exports by their transfer. Owned by the daemon's event loop."""

    def begin(self, transfer: str, file: Path, owner: object) -> ModelExport:
        """Return a new export, which ends with its *owner*.

        :raises InvalidArgument: the transfer exists.
        :raises Busy: too many models are exported.
        """
        if transfer in self._transfers:
            raise InvalidArgument("a transfer with this id is under way")
        if len(self._transfers) >= EXPORTS_MAX:
            raise Busy(
                f"{EXPORTS_MAX} models are being exported, which is the limit",
                hint="try again when an export has ended",
                data={"exports_max": EXPORTS_MAX, "retry_after_s": 5.0},
            )
        found = self._transfers[transfer] = ModelExport(file, owner)
        return found

    async def end(self, transfer: str, owner: object) -> None:
        """End an export, if there is one."""
        found = self._transfers.get(transfer)
        if found is not None and found.owner is owner:
            del self._transfers[transfer]
            await found.close()
