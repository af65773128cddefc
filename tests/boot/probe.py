"""Attempts at actions that the system unit forbids; runs instead of the daemon, and prints results
as JSON: for each attempt whether it succeeded, or why not.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER, UNAME26 = 0x10000000, 0x0020000
WRITE_AND_RUN = mmap.PROT_WRITE | mmap.PROT_EXEC
MARK = "/tmp/mark-of-the-machine"
DEVICE = "/var/lib/inferd/kmsg"
"""A file that stands for a device that is not harmless."""
ELSEWHERE, HERE = "10.99.0.1", "127.0.0.1"


def call(name: str, *arguments: object) -> None:
    """Call a function of libc.

    :raises OSError: it failed.
    """
    if getattr(LIBC, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def connect(address: str) -> None:
    """Connect to a listener that the test has opened."""
    with socket.create_connection((address, int(sys.argv[1])), timeout=1):
        pass


def write_below(folder: str) -> None:
    """Write a file there."""
    path = Path(folder) / "written-by-the-probe"
    path.touch()
    path.unlink()


def writable(*folders: str) -> None:
    """Check that a mount is writable, whichever user owns it.

    :raises OSError: it is read-only.
    """
    if any(os.statvfs(folder).f_flag & os.ST_RDONLY for folder in folders):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def set_id(mode: int) -> None:
    """Set the mode of an own file."""
    path = Path("/var/lib/inferd/probe")
    path.touch()
    try:
        path.chmod(mode)
    finally:
        path.unlink()


def status(key: str) -> str:
    """Return a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith(f"{key}:"))


ATTEMPTS: dict[str, Callable[[], object]] = {
    "write its state": lambda: write_below("/var/lib/inferd"),
    "write the system": lambda: writable("/", "/etc", "/opt", "/var"),
    "see homes": lambda: os.listdir("/home"),
    "see others' temporary files": lambda: os.stat(MARK),
    "write temporary files": lambda: write_below("/tmp"),
    "open a device": lambda: os.open(DEVICE, os.O_WRONLY),
    "see devices": lambda: os.stat("/dev/console"),
    "use random numbers": lambda: os.open("/dev/urandom", os.O_RDONLY),
    "see other users' processes": lambda: os.stat("/proc/1"),
    "read free memory": lambda: Path("/proc/meminfo").read_text(),
    "see the kernel's symbols": lambda: os.open("/proc/kallsyms", os.O_RDONLY),
    "change cgroups": lambda: writable("/sys/fs/cgroup"),
    "make a user namespace": lambda: call("unshare", NEW_USER),
    "make memory that is written and run": lambda: mmap.mmap(-1, 4096, prot=WRITE_AND_RUN),
    "make a set-user-id file": lambda: set_id(0o4755),
    "change a mode": lambda: set_id(0o640),
    "change the personality": lambda: call("personality", UNAME26),
    "yield its cores": lambda: os.setpriority(os.PRIO_PROCESS, 0, os.nice(0) + 1),
    "choose its cores": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "talk to the kernel": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "connect to this machine": lambda: connect(HERE),
    "connect elsewhere": lambda: connect(ELSEWHERE),
}


def outcome(attempt: Callable[[], object]) -> str:
    """Run an attempt; return `done`, or the name of the error."""
    try:
        attempt()
    except TimeoutError:
        return "no answer"
    except OSError as exc:
        return errno.errorcode.get(exc.errno or 0, repr(exc))
    return "done"


if __name__ == "__main__":
    found = {name: outcome(attempt) for name, attempt in ATTEMPTS.items()}
    keys = ("NoNewPrivs", "CapBnd", "Umask")
    found |= {key: status(key) for key in keys}
    sys.stdout.write(json.dumps(found) + "\n")
