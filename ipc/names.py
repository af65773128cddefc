"""The names of the priority classes, the lowest first, whose order `scheduler.owner` has; and the
names in a client's hello: the label of a program, and the user for whom a gateway acts.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from ..backends.errors import InvalidArgument

Priority: TypeAlias = Literal["low", "normal", "high", "urgent"]


LABEL_CHARACTERS_MAX = 64
NAME_CHARACTERS_MAX = 128
OWN_USER = "@"
"""The first character of the name of a gateway's own user."""
_LABEL = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:@+-]{{0,{LABEL_CHARACTERS_MAX - 1}}}")
"""No slash, white space or control character, because labels are parts of names, also in logs."""
_NAME = re.compile(rf"(?!.{{{NAME_CHARACTERS_MAX + 1}}}){OWN_USER}?[A-Za-z0-9_][A-Za-z0-9._:@+$-]*")


def check_label(label: str) -> None:
    """Check a label; an empty one means none.

    :raises InvalidArgument: the label is too long, or has characters that are not allowed.
    """
    if label and not _LABEL.fullmatch(label):
        shown = label[:LABEL_CHARACTERS_MAX]
        raise InvalidArgument(
            f"the label {shown!r} has {len(label)} characters, or some that are not allowed",
            hint=f"a label has 1 to {LABEL_CHARACTERS_MAX} letters, digits and . _ : @ + -, and"
            " begins with a letter or digit",
            data={"label_characters_max": LABEL_CHARACTERS_MAX},
        )


def check_key_name(name: str) -> None:
    """Check the name of a gateway's key; an empty one means none.

    :raises InvalidArgument: the name is too long, or has characters that cannot be printed.
    """
    if len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
        raise InvalidArgument(
            f"the name of a key, {name[:NAME_CHARACTERS_MAX]!r}, has {len(name)} characters, or"
            " some that cannot be printed",
            hint=f"a key's name has up to {NAME_CHARACTERS_MAX} characters",
            data={"name_characters_max": NAME_CHARACTERS_MAX},
        )


def is_user_name(name: str) -> bool:
    """Return whether a gateway may name a user like this."""
    return _NAME.fullmatch(name) is not None


def check_user_name(name: str) -> None:
    """Check the name of the user for whom a gateway acts; an empty one means none.

    :raises InvalidArgument: the name is too long, or has characters that are not allowed.
    """
    if name and not is_user_name(name):
        shown = name[:NAME_CHARACTERS_MAX]
        raise InvalidArgument(
            f"the user {shown!r} has {len(name)} characters, or some that are not allowed",
            hint=f"a name has 1 to {NAME_CHARACTERS_MAX} letters, digits and . _ : @ + $ -",
            data={"name_characters_max": NAME_CHARACTERS_MAX},
        )
