"""Accounts of the machine, and their access to files."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import msgspec

READ, WRITE, SEARCH = os.R_OK, os.W_OK, os.X_OK


class Account(msgspec.Struct, frozen=True):
    """A user with the groups of their processes."""

    name: str
    uid: int
    groups: frozenset[int]


def own_account() -> Account:
    """Return the account of this process."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return Account(name, uid, frozenset((os.getegid(), *os.getgroups())))


def account_of(name: str) -> Account | None:
    """Return the account with this name, or None if there is none."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(name, entry.pw_uid, frozenset(os.getgrouplist(name, entry.pw_gid)))


def may(account: Account, status: os.stat_result, bits: int) -> bool:
    """Return whether a file's mode grants *account* all of *bits*; access lists are ignored."""
    mode = stat.S_IMODE(status.st_mode)
    if account.uid == status.st_uid:
        mode >>= 6
    elif status.st_gid in account.groups:
        mode >>= 3
    return account.uid == 0 or mode & bits == bits


def find_denial(account: Account, path: Path, bits: int) -> str:
    """Return the first folder on the way to an existing *path* that *account* may not search, or
    *path* itself if it denies the access *bits*; an empty text if nothing is denied.

    :raises OSError: the caller may not examine a place.
    """
    is_caller = account.uid == os.geteuid()
    way = [(folder, SEARCH) for folder in reversed(path.parents)]
    for place, wanted in (*way, (path, bits)):
        # `os.access` respects access lists, but answers only for the caller.
        if is_caller:
            allowed = os.access(place, wanted, effective_ids=True)
        else:
            allowed = may(account, os.stat(place), wanted)
        if not allowed:
            return str(place)
    return ""
