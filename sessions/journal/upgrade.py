"""Rows of tables 1, rewritten as this version stores them.

Tables 1 left out each value that was equal to its default, and stored priorities by number. The
defaults that hold for such rows are those of the structs below `sessions` when tables 2 began.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from ...scheduler.priority import Priority
from .entries import HistoryEntry, SessionFacts, TurnPiece, encode

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("session", "facts", "facts_crc"),
    ("session", "past", "past_crc"),
    ("piece", "data", "crc"),
)


def upgrade_rows(db: sqlite3.Connection) -> None:
    """Rewrite all rows, inside the caller's transaction. A damaged row stays as it is: reading
    finds it.
    """
    for table, column, crc_column in _COLUMNS:
        rows = db.execute(f"SELECT rowid, {column}, {crc_column} FROM {table}").fetchall()
        for rowid, data, crc in rows:
            if zlib.crc32(data) != crc:
                continue
            with suppress(msgspec.MsgspecError, ValueError):
                new = _REWRITERS[column](msgspec.msgpack.decode(data))
                db.execute(
                    f"UPDATE {table} SET {column} = ?, {crc_column} = ? WHERE rowid = ?",
                    (new, zlib.crc32(new), rowid),
                )


def _facts(values: dict[str, Any]) -> bytes:
    return encode(msgspec.convert(_with_priority_name(values), SessionFacts))


def _piece(values: dict[str, Any]) -> bytes:
    return encode(msgspec.convert(_with_named_begin(values), TurnPiece))


def _past(values: dict[str, Any]) -> bytes:
    told = values.get("told")
    named = values if told is None else {**values, "told": _with_named_begin(told)}
    return encode(msgspec.convert(named, HistoryEntry))


def _with_named_begin(piece: dict[str, Any]) -> dict[str, Any]:
    begin = piece.get("begin")
    return piece if begin is None else {**piece, "begin": _with_priority_name(begin)}


def _with_priority_name(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "priority": Priority(values.get("priority", Priority.NORMAL)).label}


_REWRITERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "facts": _facts,
    "past": _past,
    "data": _piece,
}
