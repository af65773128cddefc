"""Files of models and their projectors that are read part by part for another daemon, or arrive
part by part from one or from a client's descriptor.

Until an arriving file has passed its checks, it is ``NAME.gguf.import`` in the models directory,
and `inferd pull` of the same name is locked out. One rename publishes the model, and one its
projector, ``NAME-mmproj.gguf``, just before. A file whose daemon was killed is removed at the next
start.
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
from ..pull.target import (
    PROJECTOR_ENDING,
    exists_error,
    locked_name,
    publish_part,
    write_error,
)
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

    def is_under_way(self, transfer: str, owner: object) -> bool:
        """Return whether *owner* has begun a transfer that has not ended."""
        found = self._transfers.get(transfer)
        return found is not None and found.owner is owner

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


class ArrivingFile:
    """The file `NAME.gguf` of the models directory that is being written. A projector may be there
    already with the same contents (*may_exist*). The methods run in a thread.
    """

    def __init__(self, name: str, models_dir: Path, size: int, *, may_exist: bool = False):
        self.target = models_dir / f"{name}.gguf"
        self._name, self._size, self._may_exist = name, size, may_exist
        self._part = Part(models_dir / f"{name}{SUFFIX}", f"the copy of {name}", _no_progress)
        self._stack = ExitStack()
        self._is_open = self._is_clone = self._exists = False
        self.is_finished = False
        """Whether it has passed its checks."""

    @property
    def received(self) -> int:
        """The bytes that were written."""
        return self._part.size

    @property
    def sha256(self) -> str:
        """The hash of the bytes that were written."""
        return self._part.sha256

    def write(self, data: bytes) -> bool:
        """Write the next part; return whether that was the last one.

        :raises BackendError: the file cannot be written, or is larger than announced.
        """
        with errors_of(self.target):
            if not self._is_open:
                self._open()
            self._part.write_block(data)
            if self._part.size > self._size:
                raise PullFailed(f"the copy of {self._name} has more bytes than announced")
            return self._part.size == self._size

    def copy_block(self, descriptor: int) -> bool:
        """Copy the next block of a file, or let all its blocks be shared where the file system can;
        return whether that was the last one.

        :raises BackendError: the file cannot be read or written, or is not GGUF.
        """
        with errors_of(self.target):
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
                raise PullFailed(f"the file of {self._name} became shorter while it was copied")
            return self.received >= self._size

    def finish(self, sha256: str, notes: Mapping[str, bytes] | None = None) -> None:
        """Check the file; with *notes*, also that it has all bytes that its header promises.

        :raises BackendError: it cannot be written, or fails its checks.
        """
        with errors_of(self.target):
            if notes is not None:
                self._part.check_complete()
                self._part.notes.update(notes)
            self._part.finish_file(sha256)
            if self._exists and hash_file(self.target) != self._part.sha256:
                raise exists_error(self.target)
            self.is_finished = True

    def publish(self) -> bool:
        """Give the finished file its name; return whether it was not there before.

        :raises BackendError: it cannot be renamed.
        """
        with errors_of(self.target):
            if not self._exists:
                publish_part(self._part, self.target, self._name, replace=False)
                self._is_open = False
        self.discard()
        return not self._exists

    def _open(self) -> None:
        folder = self.target.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(locked_name(folder / f".{self._name}.lock", self._name))
        self._is_open = True
        self._exists = os.path.lexists(self.target)
        if self._exists and not (self._may_exist and self.target.stat().st_size == self._size):
            raise exists_error(self.target)
        self._part.check_space(self._size, keep_free=FREE_BYTES_MIN)
        self._part.open_file()

    def discard(self) -> None:
        """Remove the written part of the file, unless the file was published."""
        if self._is_open:
            self._is_open = False  # the name may soon be another import's
            self._part.remove()
        self._stack.close()


class ModelImport:
    """The file of a model, and perhaps its projector before it. Both are published at once, the
    projector first, so that no load of the model misses it. A projector alone is for a model that
    is here already.
    """

    def __init__(self, name: str, models_dir: Path, owner: object):
        self.name, self.owner = name, owner
        self._models_dir = models_dir
        self._model: ArrivingFile | None = None
        self._projector: ArrivingFile | None = None
        self.lock = anyio.Lock()
        """Held while a part is written, and while the files are removed."""

    def file_of(self, part: ImportedPart) -> ArrivingFile:
        """Return the file to which a part belongs; a part at 0 begins it.

        :raises InvalidArgument: it is not the next part.
        """
        file = self._projector if part.is_projector else self._model
        have = 0 if file is None else file.received
        if part.offset != have or not part.data:
            raise InvalidArgument(
                f"a part of {len(part.data)} bytes at {part.offset}, after {have} bytes",
                hint="send the parts in order, from 0 on",
            )
        return file or self.begin_file(part.size, is_projector=part.is_projector)

    def begin_file(self, size: int, *, is_projector: bool = False) -> ArrivingFile:
        """Begin the model's file, or its projector's."""
        if is_projector:
            name = f"{self.name}{PROJECTOR_ENDING}"
            self._projector = ArrivingFile(name, self._models_dir, size, may_exist=True)
            return self._projector
        self._model = ArrivingFile(self.name, self._models_dir, size)
        return self._model

    def write(self, file: ArrivingFile, part: ImportedPart) -> bool:
        """Write the next part of a file. With its last part, check the file, and publish the model
        if that is complete or here already; return whether that has happened.

        :raises BackendError: the file cannot be written, or fails its checks.
        """
        if not file.write(part.data):
            return False
        file.finish(part.sha256)
        if file is self._projector and not (self._models_dir / f"{self.name}.gguf").exists():
            return False
        self.publish()
        return True

    def publish(self) -> None:
        """Publish the finished files; if that fails, neither of them.

        :raises InvalidArgument: the projector is incomplete.
        :raises BackendError: a file cannot be renamed.
        """
        projector, model = self._projector, self._model
        if projector is not None and not projector.is_finished:
            raise InvalidArgument("the projector is incomplete", hint="send its parts first")
        is_new = projector is not None and projector.publish()
        try:
            if model is not None:
                model.publish()
        except BaseException:
            if projector is not None and is_new:
                projector.target.unlink(missing_ok=True)
            raise

    async def close(self) -> None:
        """Remove the written parts of files that were not published."""
        async with self.lock:
            await anyio.to_thread.run_sync(self.discard)

    def discard(self) -> None:
        """Remove the written parts of files that were not published, in a thread."""
        for file in (self._projector, self._model):
            if file is not None:
                file.discard()


class ImportedPart(NamedTuple):
    """A part of a file of *size* bytes. The last one has the hash that the file must have."""

    offset: int
    data: bytes
    size: int
    sha256: str = ""
    is_projector: bool = False


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
    ) -> str:
        """Copy a passed file in the thread of its *user*, publish it, and return its SHA-256. If
        this fails, the import is ended.

        :raises BackendError: the file cannot be read or written, or fails its checks.
        :raises Timeout: a block cannot be read in time.
        """
        try:
            async with found.lock:
                file, is_complete = found.begin_file(passed.size), False
                while not is_complete:
                    # A block that is being copied when the call is cancelled is copied to its end.
                    with anyio.CancelScope(shield=True):
                        is_complete = await user.run(file.copy_block, passed.descriptor)
                    await anyio.lowlevel.checkpoint()
                    on_progress(file.received / max(1, passed.size))
                # To sync a large file to disk may take longer than an operation on a descriptor.
                await anyio.to_thread.run_sync(file.finish, passed.sha256, passed.notes)
                await anyio.to_thread.run_sync(found.publish)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.end(transfer, found.owner)
            raise
        self._transfers.pop(transfer, None)
        return file.sha256

    async def add_part(self, found: ModelImport, transfer: str, part: ImportedPart) -> bool:
        """Write the next part of a file; return whether the import has ended with the publication
        of the model, or of the projector of a model that is here. If this fails, it is ended.

        :raises InvalidArgument: it is not the next part.
        :raises BackendError: the file cannot be written, or fails its checks.
        """
        try:
            async with found.lock:
                self.find(transfer, found.owner)  # it may have ended meanwhile
                file = found.file_of(part)
                is_published = await anyio.to_thread.run_sync(found.write, file, part)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.end(transfer, found.owner)
            raise
        if is_published:
            self._transfers.pop(transfer, None)
        return is_published

    def begin(self, transfer: str, name: str, models_dir: Path, owner: object) -> ModelImport:
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
        found = self._transfers[transfer] = ModelImport(name, models_dir, owner)
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
