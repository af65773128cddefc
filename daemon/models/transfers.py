"""Files of models that are read part by part for another daemon, or arrive part by part from one
or from a client's descriptor.

Until an arriving file has passed its checks, it is ``NAME.gguf.import`` in the models directory,
and `inferd pull` of the same name is locked out. One rename publishes the model. A file whose
daemon was killed is removed at the next start.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from ...backends.errors import BackendError, Busy, InvalidArgument, UnsupportedOperation
from ...backends.gguf import PART
from ...ipc.messages import PART_BYTES
from ...ipc.server.descriptors import UserDescriptors
from ..config.model_settings import check_model_name
from ..pull.part import BLOCK, Part, PullFailed, hash_file
from ..pull.target import exists_error, locked_name, publish_part, write_error
from .model_files import identity_of

T = TypeVar("T", bound="ModelExport | ModelImport")


class OwnedTransfers(Generic[T]):
    """Exports or imports by their ids, each of which ends with the connection that began it, its
    owner. Owned by the daemon's event loop.
    """

    def __init__(self) -> None:
        self._transfers: dict[str, T] = {}

    def find(self, transfer: str, owner: object) -> T:
        """Return a transfer of *owner*.

        :raises InvalidArgument: it has none with this id.
        """
        found = self._transfers.get(transfer)
        if found is None or found.owner is not owner:
            raise InvalidArgument("no transfer has this id", hint="begin it with a part at 0")
        return found

    def of_owner(self, owner: object) -> list[str]:
        """Return the ids of the transfers of *owner*."""
        return [name for name, found in self._transfers.items() if found.owner is owner]

    async def end(self, transfer: str, owner: object) -> None:
        """End a transfer of *owner*, if there is one, and close its file."""
        found = self._transfers.get(transfer)
        if found is not None and found.owner is owner:
            await found.close()
            # Another end may have closed it meanwhile, so that a new transfer has its id.
            if self._transfers.get(transfer) is found:
                del self._transfers[transfer]


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


IMPORTS_MAX = 2
FREE_BYTES_MIN = 256 << 20
"""Disk space that an import leaves to others, such as the journal of sessions."""
SUFFIX = ".gguf.import"


class ModelImport:
    """A file that is being written. Its methods that block run in a thread."""

    def __init__(self, name: str, models_dir: Path, size: int, owner: object):
        self.name, self.owner = name, owner
        self._size = size
        self._target = models_dir / f"{name}.gguf"
        self._part = Part(models_dir / f"{name}{SUFFIX}", f"the copy of {name}", _no_progress)
        self._stack = ExitStack()
        self._is_open = self._is_clone = False
        self.lock = anyio.Lock()
        """Held while a part is written, and while the file is removed."""

    @property
    def received(self) -> int:
        """The bytes that were written."""
        return self._part.size

    @property
    def sha256(self) -> str:
        """The hash of the bytes that were written."""
        return self._part.sha256

    def write(self, data: bytes, sha256: str) -> bool:
        """Write the next part. With the last one, check the file and publish it; return whether
        that has happened.

        :raises BackendError: the file cannot be written, or fails its checks.
        """
        with errors_of(self._target):
            if not self._is_open:
                self._open()
            self._part.write_block(data)
            return self._publish_if_complete(sha256)

    def copy_block(self, descriptor: int) -> bool:
        """Copy the next block of a file, or let all its blocks be shared where the file system can;
        return whether that was the last one.

        :raises BackendError: the file cannot be read or written, or is not GGUF.
        """
        with errors_of(self._target):
            if not self._is_open:
                self._open()
                self._is_clone = self._part.clone_descriptor(descriptor)
            if self._is_clone:
                is_read = self._part.read_block()
            else:
                size = min(BLOCK, self._size - self.received)
                block = os.pread(descriptor, size, self.received)
                is_read = bool(block)
                self._part.write_block(block)
            if not is_read and self.received < self._size:
                raise PullFailed(f"the file of {self.name} became shorter while it was copied")
            return self.received >= self._size

    def publish(self, sha256: str, notes: Mapping[str, bytes]) -> None:
        """Check the file that was copied, and publish it with *notes*.

        :raises BackendError: the file cannot be written, or fails its checks.
        """
        with errors_of(self._target):
            self._part.check_complete()
            self._part.notes.update(notes)
            self._publish_if_complete(sha256)

    def _publish_if_complete(self, sha256: str) -> bool:
        if self._part.size < self._size:
            return False
        if self._part.size > self._size:
            raise PullFailed(f"the copy of {self.name} has more bytes than announced")
        self._part.finish_file(sha256)
        publish_part(self._part, self._target, self.name, replace=False)
        self._is_open = False
        self._stack.close()
        return True

    def _open(self) -> None:
        folder = self._target.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(locked_name(folder / f".{self.name}.lock", self.name))
        self._is_open = True
        if os.path.lexists(self._target):
            raise exists_error(self._target)
        self._part.check_space(self._size, keep_free=FREE_BYTES_MIN)
        self._part.open_file()

    async def close(self) -> None:
        """Remove the written part of the file, unless the file was published."""
        async with self.lock:
            await anyio.to_thread.run_sync(self.discard)

    def discard(self) -> None:
        """Remove the written part of the file, in a thread."""
        if self._is_open:
            self._is_open = False  # the name may soon be another import's
            self._part.remove()
        self._stack.close()


class PassedModel(NamedTuple):
    """A file that a client has passed in a descriptor, with the hash that it must have, if any."""

    descriptor: int
    size: int
    sha256: str = ""
    notes: Mapping[str, bytes] = {}


class ModelImports(OwnedTransfers[ModelImport]):
    """The imports by their transfer. Owned by the daemon's event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._hashes = anyio.Semaphore(IMPORTS_MAX)
        """Held while a file is read, so that the threads stay free for others."""

    async def find_file(self, file: Path, *, with_hash: bool) -> tuple[bool, int, str]:
        """Return whether a model's *file* exists, with its size and perhaps its hash.

        :raises BackendError: the file cannot be read.
        """
        async with self._hashes:
            return await anyio.to_thread.run_sync(_read_file, file, with_hash)

    async def add_passed(
        self,
        found: ModelImport,
        transfer: str,
        passed: PassedModel,
        user: UserDescriptors,
        on_progress: Callable[[float], None],
    ) -> None:
        """Copy a passed file in the thread of its *user*, and publish it. If this fails, the import
        is ended.

        :raises BackendError: the file cannot be read or written, or fails its checks.
        :raises Timeout: a block cannot be read in time.
        """
        try:
            async with found.lock:
                is_complete = False
                while not is_complete:
                    # A block that is being copied when the call is cancelled is copied to its end.
                    with anyio.CancelScope(shield=True):
                        is_complete = await user.run(found.copy_block, passed.descriptor)
                    await anyio.lowlevel.checkpoint()
                    on_progress(found.received / max(1, passed.size))
                # To sync a large file to disk may take longer than an operation on a descriptor.
                await anyio.to_thread.run_sync(found.publish, passed.sha256, passed.notes)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.end(transfer, found.owner)
            raise
        self._transfers.pop(transfer, None)

    async def add_part(
        self, found: ModelImport, transfer: str, offset: int, data: bytes, sha256: str
    ) -> bool:
        """Write the next part of an import; return whether the model was published. If this fails,
        the import is ended.

        :raises InvalidArgument: it is not the next part.
        :raises BackendError: the file cannot be written, or fails its checks.
        """
        try:
            async with found.lock:
                self.find(transfer, found.owner)  # it may have ended meanwhile
                if offset != found.received or not data:
                    raise InvalidArgument(
                        f"a part of {len(data)} bytes at {offset}, after {found.received} bytes",
                        hint="send the parts in order, from 0 on",
                    )
                is_published = await anyio.to_thread.run_sync(found.write, data, sha256)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.end(transfer, found.owner)
            raise
        if is_published:
            self._transfers.pop(transfer, None)
        return is_published

    def begin(
        self, transfer: str, name: str, models_dir: Path, size: int, owner: object
    ) -> ModelImport:
        """Return a new import, which ends with its *owner*.

        :raises InvalidArgument: the name is invalid, or the transfer exists.
        :raises Busy: the name is being imported, or too many models are.
        """
        check_model_name(name)
        if transfer in self._transfers:
            raise InvalidArgument("a transfer with this id is under way")
        names = [other.name for other in self._transfers.values()]
        if name in names or len(names) >= IMPORTS_MAX:
            raise Busy(
                f"models are being imported: {', '.join(names)}",
                hint="try again when an import has ended",
                data={"imports_max": IMPORTS_MAX, "retry_after_s": 5.0},
            )
        found = self._transfers[transfer] = ModelImport(name, models_dir, size, owner)
        return found


def remove_unfinished(models_dir: Path) -> None:
    """Remove the files of imports that a killed daemon has left. Those of another daemon on the
    same directory are locked, and stay.
    """
    try:
        files = list(models_dir.glob(f"*{SUFFIX}"))
        for file in files:
            name = file.name.removesuffix(SUFFIX)
            try:
                with locked_name(models_dir / f".{name}.lock", name):
                    file.unlink(missing_ok=True)
            except PullFailed:
                continue
    except OSError:
        return  # the models directory cannot be read or written; its component reports that


def _read_file(file: Path, with_hash: bool) -> tuple[bool, int, str]:
    with errors_of(file):
        if not os.path.lexists(file):
            return False, 0, ""
        return True, file.stat().st_size, hash_file(file) if with_hash else ""


@contextmanager
def errors_of(target: Path) -> Iterator[None]:
    """Raise errors of the file *target* as errors of a call."""
    try:
        yield
    except OSError as exc:
        error = write_error(exc, target)
        raise BackendError(error.message, hint=error.hint) from None
    except PullFailed as exc:
        raise BackendError(exc.message, hint=exc.hint) from None


def _no_progress(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""
