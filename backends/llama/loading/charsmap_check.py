"""The check of a Unigram vocabulary's map of characters (`tokenizer.ggml.precompiled_charsmap`).

llama.cpp throws at a text that leads out of the map, which ends the process. The map is that of
SentencePiece: a XOR-compressed double array, then the replacements, each of which ends with a NUL.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SIZE_BYTES, _ENTRY_BYTES = 4, 4
BYTES_MAX = 4 << 20
"""SentencePiece's own maps have 240 to 247 kB. This many bytes take a second to check."""
_BLOCK = 256
_LABEL, _VALUE = 0x8000_00FF, 0x7FFF_FFFF
_STATES = 256
"""States that are followed together: more would take too much memory."""
_Indices = NDArray[np.int64]


def is_charsmap_usable(data: bytes) -> bool:
    """Return whether no text leads out of the map. A map that is too short for its own size counts
    as usable: llama.cpp refuses it. Takes 25 ms for `nmt_nfkc`.
    """
    if len(data) > BYTES_MAX:
        return False
    size = int.from_bytes(data[:_SIZE_BYTES], "little")
    count = size // _ENTRY_BYTES
    if _SIZE_BYTES + size >= len(data) or not count:
        return True
    entries = np.frombuffer(data, "<u4", count, _SIZE_BYTES)
    return _Walk(entries, data.rfind(b"\0", _SIZE_BYTES + size) - _SIZE_BYTES - size).is_inside()


class _Walk:
    """A walk over all states of the array; *value_max* is the place of the last NUL behind it."""

    def __init__(self, entries: NDArray[np.uint32], value_max: int):
        self._values = (entries & _VALUE).astype(np.int64)
        self._labels = (entries & _LABEL).astype(np.int64)
        self._leaves = (entries >> 8 & 1).astype(np.bool_)
        self._bases = (entries >> 10).astype(np.int64) << ((entries & 0x200) >> 6).astype(np.int64)
        self._value_max = value_max
        self._seen = np.zeros(len(entries), np.bool_)

    def is_inside(self) -> bool:
        """Follow each byte from each state; return whether all entries on the way exist."""
        waiting = [self._bases[:1]]
        while waiting:
            states = waiting.pop()
            if not self._has(states):
                return False
            for begin in range(0, len(states), _STATES):
                found = self._next(states[begin : begin + _STATES])
                if found is None:
                    return False
                if len(found):
                    waiting.append(found)
        return True

    def _has(self, states: _Indices) -> bool:
        """Return whether the entries for all bytes from these states exist."""
        return bool((states | (_BLOCK - 1) < len(self._bases)).all())

    def _next(self, states: _Indices) -> _Indices | None:
        """Return the unseen states after these, or None if one of them leads out of the map."""
        states = np.unique(states[~self._seen[states]])
        self._seen[states] = True
        labels = np.arange(1, _BLOCK)
        entries = states[:, None] ^ labels
        children = entries[self._labels[entries] == labels]
        found = children ^ self._bases[children]
        if not self._has(found):
            return None
        if (self._values[found[self._leaves[children]]] > self._value_max).any():
            return None
        result: _Indices = found[~self._seen[found]]
        return result
