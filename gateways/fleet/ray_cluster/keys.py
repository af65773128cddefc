"""TLS and token authentication of a Ray cluster: the files in `ray`, beside a fleet's certificates.

They come from an authority of their own, so that a stolen certificate of Ray opens no relay.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path

from ....backends.errors import InvalidArgument
from ..certificates import (
    AUTHORITY,
    ENTRY,
    Authority,
    KeyFiles,
    Role,
    check_files,
    is_owner_only,
    write_private,
)

TITLE = "inferd authority for Ray"
TOKEN_BYTES = 32
Environment = dict[str, str]


def ray_folder(certificates: Path) -> Path:
    """Return the folder of Ray's files, which need not exist."""
    return certificates / "ray"


def token_file(folder: Path) -> Path:
    """Return the file of the token that all members of the cluster have."""
    return folder / "token"


class RayKeys:
    """Makes Ray's files, in `ray` in the folder of the fleet's *certificates*."""

    def __init__(self, certificates: Path):
        self.folder = ray_folder(certificates)
        self._authority = Authority(self.folder, TITLE)

    def open_or_create(self) -> bool:
        """Read the authority, or make it and the token if there are none; return whether it is new.

        :raises InvalidArgument: the authority cannot be read or written.
        """
        is_new = self._authority.open_or_create()
        if not token_file(self.folder).exists():
            write_private(token_file(self.folder), secrets.token_hex(TOKEN_BYTES).encode())
        return is_new

    def issue(self, name: str, addresses: Collection[str], days: int) -> KeyFiles:
        """Write a new key and certificate of the member *name*, whose *addresses* other members
        check, and return their files.

        :raises InvalidArgument: the name or the number of days is not allowed, or a file cannot be
            written.
        """
        return self._authority.issue(name, Role.RAY, days, addresses=addresses)


def members_of(texts: Iterable[str]) -> dict[str, list[str]]:
    """Return the addresses of each member in arguments NAME=ADDRESS.

    :raises InvalidArgument: an argument has another form.
    """
    members: dict[str, list[str]] = {}
    for text in texts:
        name, _, address = text.partition("=")
        if not name or not _is_address(address):
            raise InvalidArgument(
                f"{text!r} does not name a member and its address",
                hint="give NAME=ADDRESS, such as gpu-1=10.0.0.2, without a port",
            )
        members.setdefault(name, []).append(address)
    return members


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return bool(text) and ":" not in text  # the name of a host
    return True


def issue_for_members(
    certificates: Path, members: Mapping[str, Collection[str]], days: int, *, renew: bool
) -> list[str]:
    """Write what the members of a cluster need, and return the files of new certificates.

    :raises InvalidArgument: as `RayKeys` does.
    """
    if not members:
        return []
    keys = RayKeys(certificates)
    keys.open_or_create()
    return [
        str(keys.issue(name, addresses, days).certificate)
        for name, addresses in members.items()
        if renew or not KeyFiles.of(keys.folder, name).certificate.exists()
    ]


def ray_environment(certificates: Path, name: str) -> Environment:
    """Return the variables with which Ray's programs use the files of the member *name*; none if
    *certificates* has no folder `ray`.

    :raises InvalidArgument: a file is missing, or cannot be used.
    """
    folder = ray_folder(certificates)
    if not folder.exists():
        return {}
    files, authority = KeyFiles.of(folder, name), KeyFiles.of(folder, AUTHORITY).certificate
    token = token_file(folder)
    try:
        check_files(files)
        authority.read_bytes()
        if not is_owner_only(token):
            raise InvalidArgument(
                f"other users can read the token {token}",
                hint=f"chmod 600 {token}; if others may have read it, make a new one",
            )
    except OSError as exc:
        raise InvalidArgument(
            f"Ray's files of {name} in {folder} cannot be used: {exc.strerror or exc}",
            hint=f"copy {name}.pem, {name}.key, {authority.name} and {token.name} there, from the"
            f" folder in which `inferd fleet init --ray {name}=ADDRESS` has made them",
        ) from None
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(files.certificate.absolute()),
        "RAY_TLS_SERVER_KEY": str(files.key.absolute()),
        "RAY_TLS_CA_CERT": str(authority.absolute()),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token.absolute()),
    }


def member_in(certificates: Path) -> str:
    """Return the name of the member whose files are in a folder; the entry's, if there are several
    or none.
    """
    names = {file.stem for file in ray_folder(certificates).glob("*.key")} - {AUTHORITY}
    return names.pop() if len(names) == 1 else ENTRY
