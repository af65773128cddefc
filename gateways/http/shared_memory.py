"""Regions of shared memory that callers have registered, by their owners.

A region is a part of a file in `/dev/shm` that belongs to the caller's user of this system. It is
read and written by a descriptor and never mapped: its owner may cut the file off at any time, which
would end a process that maps it.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from ...backends.errors import (
    BackendError,
    Busy,
    InferdError,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    PermissionDenied,
    QuotaExceeded,
    UnsupportedOperation,
)

R = TypeVar("R")
DIRECTORY = "/dev/shm"
REGIONS_MAX = 256
"""Regions of all callers, each of which has an open file."""
OWNER_REGIONS_MAX = 64
OWNER_BYTES_MAX = 1 << 30
RETRY_AFTER_S = 1.0
_NAME_BYTES_MAX = 255
_ROOT = 0
# Without O_NONBLOCK the open of a pipe could wait for ever.
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")


class RegionOwner(NamedTuple):
    """A caller with regions: the name of its key, empty without one, and its user of this system by
    name or number.
    """

    key: str
    user: str


class OwnerThread:
    """The thread in which an owner's files are opened, read and written. The owner can make that
    take long, for itself alone.
    """

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(1)

    async def run(self, function: Callable[..., R], *args: Any) -> R:
        """Run a function after those of the owner's other requests."""
        return await anyio.to_thread.run_sync(function, *args, limiter=self._limiter)


class Region:
    """A registered part of the file behind *descriptor*, which is closed with the last reference:
    a request that uses the region may end after it was unregistered.
    """

    def __init__(
        self, name: str, key: str, offset: int, size: int, descriptor: int, thread: OwnerThread
    ):
        self.name, self.key, self.offset, self.size = name, key, offset, size
        self.thread = thread
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)

    @property
    def description(self) -> dict[str, Any]:
        """The region in the protocol's form."""
        return {
            "name": self.name,
            "key": self.key,
            "offset": self.offset,
            "byte_size": self.size,
        }

    def part(self, offset: int, size: int) -> RegionPart:
        """Return a part of the region.

        :raises InvalidArgument: it does not lie within the region.
        """
        if offset + size > self.size:
            raise InvalidArgument(
                f"{size} bytes at {offset} are not within the region {self.name[:100]!r} of"
                f" {self.size} bytes",
                hint="register a larger region",
                data={"bytes": self.size},
            )
        return RegionPart(self, offset, size)

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of a part. This may take long.

        :raises InvalidArgument: the file was cut off.
        """
        found = bytearray()
        try:
            while len(found) < size:
                at = self.offset + offset + len(found)
                part = os.pread(self._descriptor, size - len(found), at)
                if not part:
                    raise self._cut_off()
                if len(part) == size:
                    return part
                found += part
        except OSError as exc:
            raise self._failed("read", exc) from None
        return bytes(found)

    def write(self, offset: int, data: bytes) -> None:
        """Write a part. This may take long.

        :raises InvalidArgument: the file was cut off.
        :raises OutOfMemory: there is no memory for it.
        """
        start, left = self.offset + offset, memoryview(data)
        try:
            # A file that is cut off after this check grows again, to what its owner has registered.
            if os.fstat(self._descriptor).st_size < start + len(data):
                raise self._cut_off()
            while left:
                count = os.pwrite(self._descriptor, left, start)
                left, start = left[count:], start + count
        except OSError as exc:
            raise self._failed("written", exc) from None

    def _cut_off(self) -> InvalidArgument:
        return InvalidArgument(
            f"the shared memory of the region {self.name[:100]!r} was cut off",
            hint="unregister the region, and keep the size of the shared memory while it is one",
        )

    def _failed(self, done: str, exc: OSError) -> InferdError:
        kind = OutOfMemory if exc.errno in (errno.ENOSPC, errno.EDQUOT) else BackendError
        return kind(
            f"the region {self.name[:100]!r} cannot be {done}: {exc.strerror}",
            hint="check the shared memory and the space in /dev/shm",
        )


class RegionPart(NamedTuple):
    """A part of a region, for a tensor."""

    region: Region
    offset: int
    size: int

    async def read(self) -> bytes:
        """Return its bytes; see `Region.read`."""
        return await self.region.thread.run(self.region.read, self.offset, self.size)

    async def write(self, data: bytes) -> None:
        """Write its first bytes; see `Region.write`."""
        await self.region.thread.run(self.region.write, self.offset, data)


class SharedRegions:
    """The regions of all callers by their owners and names. Owned by the gateway's event loop."""

    def __init__(self, *, enabled: bool = False):
        self.enabled = enabled
        """Whether callers may register regions."""
        self._regions: dict[RegionOwner, dict[str, Region]] = {}
        self._threads = WeakValueDictionary[RegionOwner, OwnerThread]()

    def check_enabled(self) -> None:
        """Check that callers may use regions.

        :raises UnsupportedOperation: they may not.
        """
        if not self.enabled:
            raise UnsupportedOperation(
                "this gateway serves no shared memory",
                hint="start it with --shared-memory, or send tensors in the request",
            )

    async def register(
        self, owner: RegionOwner, name: str, key: str, offset: int, size: int
    ) -> None:
        """Register a part of the owner's file *key*.

        :raises InferdError: it cannot be used, or the regions are too many or too large.
        """
        self._check_growth(owner, name, size)
        thread = self._threads.setdefault(owner, OwnerThread())
        descriptor = await thread.run(open_file, owner, key, offset, size)
        region = Region(name, key, offset, size, descriptor, thread)
        self._check_growth(owner, name, size)  # others may have been registered meanwhile
        self._regions.setdefault(owner, {})[name] = region

    def _check_growth(self, owner: RegionOwner, name: str, size: int) -> None:
        regions = self._regions.get(owner, {})
        if name in regions:
            raise InvalidArgument(
                f"the region {name[:100]!r} is registered already",
                hint="unregister it first, or choose another name",
            )
        if len(regions) >= OWNER_REGIONS_MAX:
            raise QuotaExceeded(
                f"the caller has {len(regions)} regions, its maximum",
                hint="unregister those that are done",
                data={"bound": "regions", "regions_max": OWNER_REGIONS_MAX},
            )
        held = sum(region.size for region in regions.values())
        if held + size > OWNER_BYTES_MAX:
            raise QuotaExceeded(
                f"the caller's regions have {held} bytes; {size} more would exceed the limit of"
                f" {OWNER_BYTES_MAX}",
                hint="unregister those that are done",
                data={"bound": "region-bytes", "bytes": held, "bytes_max": OWNER_BYTES_MAX},
            )
        if sum(map(len, self._regions.values())) >= REGIONS_MAX:
            raise Busy(
                f"the gateway has {REGIONS_MAX} regions, its maximum",
                hint="send tensors in the request, or let other callers unregister theirs",
                data={
                    "bound": "regions",
                    "regions_max": REGIONS_MAX,
                    "retry_after_s": RETRY_AFTER_S,
                },
            )

    def regions_of(self, owner: RegionOwner) -> Mapping[str, Region]:
        """Return the regions of an owner by their names."""
        return self._regions.get(owner, {})

    def find_region(self, owner: RegionOwner, name: str) -> Region:
        """Return a region of an owner.

        :raises NotFound: the owner has no such region.
        """
        region = self.regions_of(owner).get(name)
        if region is None:
            raise no_region(name)
        return region

    def unregister(self, owner: RegionOwner, name: str | None = None) -> None:
        """Forget a region, or without a name all of the owner; those that it does not have are
        ignored.
        """
        regions = self._regions.get(owner, {})
        if name is None:
            regions.clear()
        else:
            regions.pop(name, None)
        if not regions:
            self._regions.pop(owner, None)


def no_region(name: str) -> NotFound:
    """Return the error for a region that the caller does not have."""
    return NotFound(f"there is no region {name[:100]!r}", hint="register it")


def unknown_user() -> PermissionDenied:
    """Return the error for a caller whose user of this system is not known for certain."""
    return PermissionDenied(
        "the gateway does not know which user of this system the caller is",
        hint="use a key whose `user` names an ordinary user of this system, or the Unix socket of a"
        " gateway without keys (--listen unix:PATH)",
    )


def open_file(owner: RegionOwner, key: str, offset: int, size: int) -> int:
    """Open the file of a region, and return its descriptor, which the caller closes. This may take
    long.

    :raises NotFound: there is no such file.
    :raises PermissionDenied: it belongs to another user.
    :raises InvalidArgument: it is not a file with as many bytes.
    """
    uid, name = _uid_of(owner), key.removeprefix("/")
    if not 0 < len(os.fsencode(name)) <= _NAME_BYTES_MAX or "/" in name or "\0" in name:
        raise InvalidArgument(
            f"{key[:100]!r} is not the key of shared memory",
            hint=f"name a file in {DIRECTORY}, as shm_open does",
        )
    try:
        descriptor = os.open(f"{DIRECTORY}/{name}", _FLAGS)
    except OSError as exc:
        raise _not_opened(key, exc) from None
    try:
        _check_file(descriptor, uid, key, offset, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _uid_of(owner: RegionOwner) -> int:
    """Return the number of an owner's user.

    :raises PermissionDenied: the system does not know the user, or it is root by its key.
    """
    if owner.user.isascii() and owner.user.isdigit() and len(owner.user) <= 10:
        uid = int(owner.user)
    else:
        try:
            uid = pwd.getpwnam(owner.user).pw_uid
        except (KeyError, OSError):
            raise unknown_user() from None
    # All users that a container does not know have this number.
    if uid == int(_OVERFLOW_UID.read_text()) or (owner.key and uid == _ROOT):
        raise unknown_user()
    return uid


def _not_opened(key: str, exc: OSError) -> InferdError:
    text = f"the shared memory {key[:100]!r}"
    match exc.errno:
        case errno.ENOENT:
            return NotFound(f"{text} does not exist", hint=f"create it in {DIRECTORY}")
        case errno.EACCES | errno.EPERM:
            return PermissionDenied(
                f"the gateway's user may not open {text}",
                hint="let that user read and write it, or run the gateway as its owner",
            )
        case errno.EMFILE | errno.ENFILE:
            return Busy("the gateway has too many open files")
        case _:
            return _not_usable(key)


def _check_file(descriptor: int, uid: int, key: str, offset: int, size: int) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != uid:
        raise PermissionDenied(
            f"the shared memory {key[:100]!r} belongs to another user",
            hint="register shared memory of your own",
        )
    if not stat.S_ISREG(found.st_mode):
        raise _not_usable(key)
    if size < 1 or offset + size > found.st_size:
        raise InvalidArgument(
            f"{size} bytes at {offset} are not within the shared memory {key[:100]!r} of"
            f" {found.st_size} bytes",
            hint="register a part of it",
            data={"bytes": found.st_size},
        )


def _not_usable(key: str) -> InvalidArgument:
    return InvalidArgument(
        f"{key[:100]!r} is not shared memory", hint=f"name a regular file in {DIRECTORY}"
    )
