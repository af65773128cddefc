"""The KV state: one llama.cpp context, its slots and what is in them.

llama.cpp's answers are not taken for granted: `seq_rm` says true and leaves cells missing, so what
is really there is asked for after each change. A batch or number that llama.cpp would abort the
process for is refused here.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from ...base import Memory
from ...batch import Chunk, Move, length_moved
from ...errors import BackendError, KvFull, UnsupportedOperation
from ..threads import ComputeThreads

_STATE = struct.Struct("<4s16sii")
_STATE_MAGIC = b"ifkv"
_NO_CELLS = 1
_DECODE_ERRORS = {
    _NO_CELLS: "no KV cells are left for the batch",
    2: "the step was aborted",
    -1: "llama.cpp refuses the batch",
}

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = [ctypes.c_char_p, ctypes.c_ssize_t], ctypes.py_object


def _at(buffer: bytes, offset: int) -> Any:
    """Return a pointer into *buffer*, which the caller keeps alive."""
    address = ctypes.cast(ctypes.c_char_p(buffer), ctypes.c_void_p).value or 0
    return ctypes.cast(address + offset, ctypes.POINTER(ctypes.c_uint8))


class Batch:
    """One batch, allocated once: rows that all belong to exactly one sequence."""

    def __init__(self, rows_max: int):
        self.token: Any = (ctypes.c_int32 * rows_max)()
        self.position: Any = (ctypes.c_int32 * rows_max)()
        self.slot: Any = (ctypes.c_int32 * rows_max)()
        self.logits: Any = (ctypes.c_int8 * rows_max)()
        self._ones = (ctypes.c_int32 * rows_max)(*([1] * rows_max))
        # llama.cpp wants for each row a pointer to its list of sequences: here, one cell of `slot`.
        self._lists = (ctypes.POINTER(ctypes.c_int32) * rows_max)()
        address = ctypes.addressof(self.slot)
        for row in range(rows_max):
            self._lists[row] = ctypes.cast(address + 4 * row, ctypes.POINTER(ctypes.c_int32))
        self.struct = lib.llama_batch(
            n_tokens=0,
            token=self.token,
            embd=None,
            pos=self.position,
            n_seq_id=self._ones,
            seq_id=self._lists,
            logits=self.logits,
        )

    def fill(self, chunks: Sequence[Chunk], *, every: bool = False) -> dict[int, int]:
        """Write the chunks' rows; return by slot the rows that leave logits. With *every* all
        rows leave something.

        With the checks, 13 µs for 16 chunks of one row, and as much for one chunk of 128.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logits: dict[int, int] = {}
        for chunk in chunks:
            count = len(chunk.tokens)
            tokens += chunk.tokens
            positions += range(chunk.position, chunk.position + count)
            slots += (chunk.slot,) * count
            if chunk.logits:
                logits[chunk.slot] = len(tokens) - 1
        rows = len(tokens)
        self.token[:rows], self.position[:rows], self.slot[:rows] = tokens, positions, slots
        ctypes.memset(self.logits, int(every), rows)
        for row in logits.values():
            self.logits[row] = 1
        self.struct.n_tokens = rows
        return logits


class LlamaContext:
    """The slots of one context. Owned by one thread; the model must outlive it."""

    def __init__(self, pointer: Any, model: Any, *, vocab_size: int, fingerprint: str):
        self.pointer = pointer
        self.memory = lib.llama_get_memory(pointer)
        self.slots = int(lib.llama_n_seq_max(pointer))
        self.ctx_size = int(lib.llama_n_ctx_seq(pointer))
        self.batch_size = int(lib.llama_n_batch(pointer))
        self._vocab_size = vocab_size
        self._key = bytes.fromhex(fingerprint)[:16]
        self._window = int(lib.llama_model_n_swa(model))
        self._whole_only = bool(
            lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
        )
        # A hybrid says that it can shift, and moves its attention's half only.
        self.can_shift = bool(lib.llama_memory_can_shift(self.memory)) and not self._whole_only
        self._lengths = [0] * self.slots
        self._shifted: set[int] = set()
        self._batch = Batch(self.batch_size)
        self._threads = ComputeThreads(pointer)
        self._rows: dict[int, NDArray[np.float32]] = {}
        """Views of where rows of logits are, by address: making one takes 30 us."""

    def close(self) -> None:
        """Free the context; twice is once."""
        pointer, self.pointer = self.pointer, None
        if pointer is not None:
            lib.llama_free(pointer)
            self._threads.close()

    @property
    def kind(self) -> Memory:
        """What the model remembers."""
        if self._whole_only:
            return "recurrent"
        return "window" if self._window > 0 else "plain"

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds."""
        return self._lengths[self._checked(slot)]

    def decode(self, chunks: Sequence[Chunk]) -> dict[int, int]:
        """Decode a checked batch; return by slot the rows with logits until the next decode.

        :raises KvFull: what `Model.step` says.
        :raises BackendError: what `Model.step` says.
        """
        logits, threads = self._batch.fill(chunks), self._threads
        if threads.changing:
            threads.begin()
        result = lib.llama_decode(self.pointer, self._batch.struct)
        if result in (0, _NO_CELLS):
            self._shifted.clear()
        if result != 0:
            raise self._failure(result, [chunk.slot for chunk in chunks])
        if threads.changing:
            threads.settle()
        for chunk in chunks:
            self._lengths[chunk.slot] = chunk.position + len(chunk.tokens)
        return logits

    def _failure(self, result: int, slots: Sequence[int]) -> BackendError:
        """Measure what the slots of a failed batch hold, and return the error."""
        reason = _DECODE_ERRORS.get(result, "llama.cpp failed to compute")
        message = f"{reason} (llama_decode returned {result})"
        # llama.cpp says that it puts everything back; as elsewhere, what is there is asked for.
        if result == _NO_CELLS and all(self._is_complete(s, self._lengths[s]) for s in slots):
            return KvFull(message)
        for slot in slots:
            self._lengths[slot] = self._positions(slot)[1] + 1
        return BackendError(message)

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Refuse a batch that llama.cpp would abort the process for, or do wrong.

        :raises BackendError: what is wrong with it.
        """
        rows, before = 0, -1
        for chunk in chunks:
            slot, tokens = chunk.slot, chunk.tokens
            if not before < slot < self.slots:
                raise BackendError(f"slot {slot} after slot {before}, of {self.slots} slots")
            self._check_chunk(slot, tokens, chunk.position)
            rows, before = rows + len(tokens), slot
        # llama.cpp aborts the process for more.
        if not 0 < rows <= self.batch_size:
            raise BackendError(f"a batch of {rows} rows; 1 … {self.batch_size} are possible")

    def _check_chunk(self, slot: int, tokens: Sequence[int], position: int) -> None:
        if not tokens:
            raise BackendError(f"a chunk without tokens for slot {slot}")
        if position != self._lengths[slot]:
            raise BackendError(
                f"position {position} in slot {slot}, which has {self._lengths[slot]}"
            )
        if position + len(tokens) > self.ctx_size:
            raise BackendError(f"slot {slot} has room for {self.ctx_size} tokens")
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise BackendError(f"a token outside 0 … {self._vocab_size - 1} for slot {slot}")

    def row(self, index: int) -> NDArray[np.float32]:
        """Return the logits after row *index* of the last batch: a view, gone with the next one.

        :raises BackendError: that row has none.
        """
        pointer = lib.llama_get_logits_ith(self.pointer, index)
        if not pointer:
            raise BackendError(f"row {index} of the last batch has no logits")
        address = ctypes.addressof(pointer.contents)
        view = self._rows.get(address)
        if view is None:
            if len(self._rows) >= self.slots:
                self._rows.clear()
            view = self._rows[address] = np.ctypeslib.as_array(pointer, (self._vocab_size,))
        return view

    def clear(self, slot: int) -> None:
        """Empty one slot. One by one: clearing all at once breaks recurrent memory."""
        lib.llama_memory_seq_rm(self.memory, self._checked(slot), -1, -1)
        self._lengths[slot] = 0
        self._shifted.discard(slot)

    def trim(self, slot: int, keep: int) -> int:
        """Forget all but the first *keep* tokens; see `Model.trim`."""
        length = self.length(slot)
        if 0 < length <= keep:
            return length
        if keep > 0 and not self._whole_only:
            lib.llama_memory_seq_rm(self.memory, slot, keep, -1)
            if self._is_complete(slot, keep):
                self._lengths[slot] = keep
                return keep
        self.clear(slot)
        return 0

    def trim_min(self, slot: int) -> int:
        """Return the least that `trim` can leave; see `Model.trim_min`."""
        length = self.length(slot)
        if self._whole_only:
            return length
        first = self._positions(slot)[0] if self._window else 0
        return min(length, first + self._window if first > 0 else 1)

    def _is_complete(self, slot: int, length: int) -> bool:
        """Tell whether all cells are there that the token after *length* looks at.

        From the first cell to the last there are no gaps: llama.cpp sees to it
        (`llama_kv_cache::apply_ubatch`), and `move` does.
        """
        first, last = self._positions(slot)
        needed = max(0, length - self._window) if self._window else 0
        if last != length - 1:
            return False
        return self._whole_only or not length or 0 <= first <= needed

    def move(self, slot: int, moves: Sequence[Move]) -> None:
        """Move runs of tokens down and drop all others; see `Model.reuse`.

        As llama-server's cache reuse and context shift do it. llama.cpp gives the cells their
        positions at once and turns their keys at the next decode of the context, whichever slot
        it is for, and also where that finds no cells (`llama_context::decode`). A state saved in
        between has new positions with old keys and gives no error; its logits are off by 0.7 to
        1.7 (measured on models with a noise of 1e-4). So such a slot is not saved until then.
        Other slots can be, and stay as they are bit for bit. Nothing is pending for a slot that
        is cleared or restored into, as emptied cells are not turned; a trimmed one still waits.

        :raises UnsupportedOperation: the memory cannot.
        :raises BackendError: *moves* are wrong, and nothing has changed; or cells are missing,
            and the slot is then empty.
        """
        if not self.can_shift:
            raise UnsupportedOperation(
                f"a {self.kind} memory cannot be shifted", hint="switch ctx-shift and reuse off"
            )
        length = length_moved(self.length(slot), moves)
        if not length:
            return self.clear(slot)
        for begin, to, count in moves:
            if begin != to:
                lib.llama_memory_seq_rm(self.memory, slot, to, begin)
                lib.llama_memory_seq_add(self.memory, slot, begin, begin + count, to - begin)
                self._shifted.add(slot)
        lib.llama_memory_seq_rm(self.memory, slot, length, -1)
        self._lengths[slot] = length
        if not self._is_complete(slot, length):
            self.clear(slot)
            raise BackendError(f"slot {slot} has lost cells that the moved tokens look back on")

    def _positions(self, slot: int) -> tuple[int, int]:
        return (
            int(lib.llama_memory_seq_pos_min(self.memory, slot)),
            int(lib.llama_memory_seq_pos_max(self.memory, slot)),
        )

    def save(self, slot: int) -> bytes:
        """Return the state of a slot, behind a header that names the model and the length.

        :raises BackendError: the slot's cells were moved, and await a decode; see `move`.
        """
        length = self.length(slot)
        if slot in self._shifted:
            raise BackendError(f"slot {slot} was shifted and not decoded into since")
        size = lib.llama_state_seq_get_size_ext(self.pointer, slot, 0) if length else 0
        # The one way to have llama.cpp write into `bytes`: no second copy of 20 kB a token.
        state: bytes = _new_bytes(None, _STATE.size + size)
        header = _STATE.pack(_STATE_MAGIC, self._key, length, 0)
        ctypes.memmove(_at(state, 0), header, len(header))
        if size:
            written = lib.llama_state_seq_get_data_ext(
                self.pointer, _at(state, _STATE.size), size, slot, 0
            )
            if written != size:
                raise BackendError(f"slot {slot} could not be saved: {written} of {size} bytes")
        return state

    def restore(self, slot: int, state: bytes) -> bool:
        """Put a saved state into a slot; False if it does not fit, the slot is then empty."""
        self.clear(slot)
        if len(state) < _STATE.size:
            return False
        magic, key, length, _ = _STATE.unpack_from(state)
        if magic != _STATE_MAGIC or key != self._key or not 0 <= length <= self.ctx_size:
            return False
        size = len(state) - _STATE.size
        if not length:
            return size == 0
        read = lib.llama_state_seq_set_data_ext(
            self.pointer, _at(state, _STATE.size), size, slot, 0
        )
        if read != size or not self._is_complete(slot, length):
            self.clear(slot)
            return False
        self._lengths[slot] = length
        return True

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots, through a save and restore of both.

        :raises BackendError: a slot cannot be saved, and nothing has changed; or a state did not
            go back in, and both slots are then empty.
        """
        states = ((b, self.save(a)), (a, self.save(b)))
        restored = [self.restore(slot, state) for slot, state in states]
        if not all(restored):
            self.clear(a)
            self.clear(b)
            raise BackendError(f"the slots {a} and {b} could not be exchanged")

    def set_threads(self, threads: int) -> None:
        """Use this many threads from the next decode on."""
        self._threads.use(threads)

    def _checked(self, slot: int) -> int:
        # llama.cpp aborts the process for a sequence that it does not have.
        if not 0 <= slot < self.slots:
            raise BackendError(f"slot {slot} is not one of {self.slots}")
        return slot
