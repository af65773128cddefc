"""The KV state: one llama.cpp context with the contents of its slots.

llama.cpp's results are verified. `seq_rm` can return true although cells are missing, so the actual
contents are queried after each change. Batches and numbers for which llama.cpp would abort the
process are refused here.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from ...base import KvKind
from ...batch import Chunk, MediaFormat, MediaInput, Move, check_chunks, length_moved
from ...errors import BackendError, KvFull, UnsupportedOperation
from ..loading.opening import positions_max
from ..threads import ComputeThreads
from .positions import SlotPositions, Span

_STATE = struct.Struct("<4s16sii")
_STATE_MAGIC = b"ifkv"
_MROPE_MAGIC = b"ifkm"
"""The same for a model with M-RoPE. The positions of its items are behind the header."""
_MROPE = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)
_SECTIONS = 4
"""The numbers of a place in M-RoPE (`GGML_MROPE_SECTIONS`)."""
_WHOLE = 0
"""The flags of a whole state, in its header; those of a checkpoint are llama.cpp's."""
_NO_CELLS = 1
_DECODE_ERRORS = {
    _NO_CELLS: "the batch finds no free KV cells",
    2: "the step was aborted",
    -1: "llama.cpp refuses the batch",
}

_NO_SHIFT: dict[KvKind, str] = {
    "plain": "llama.cpp cannot move the tokens of this architecture",
    "hybrid": "a recurrent state does not consist of tokens",
    "window": "the cache has only the last tokens of a window, unless `swa-full` keeps all",
    "recurrent": "a recurrent state does not consist of tokens",
}

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = [ctypes.c_char_p, ctypes.c_ssize_t], ctypes.py_object


def _at(buffer: bytes, offset: int) -> Any:
    """Return a pointer into *buffer*, which the caller must keep alive."""
    address = ctypes.cast(ctypes.c_char_p(buffer), ctypes.c_void_p).value or 0
    return ctypes.cast(address + offset, ctypes.POINTER(ctypes.c_uint8))


class Batch:
    """One batch, allocated once: tokens that each belong to exactly one sequence."""

    def __init__(self, tokens_max: int):
        self.token: Any = (ctypes.c_int32 * tokens_max)()
        self.position: Any = (ctypes.c_int32 * tokens_max)()
        self.slot: Any = (ctypes.c_int32 * tokens_max)()
        self.logits: Any = (ctypes.c_int8 * tokens_max)()
        self._ones = (ctypes.c_int32 * tokens_max)(*([1] * tokens_max))
        # llama.cpp takes a pointer to a list of sequences for each token: here an item of `slot`.
        self._lists = (ctypes.POINTER(ctypes.c_int32) * tokens_max)()
        address = ctypes.addressof(self.slot)
        for index in range(tokens_max):
            self._lists[index] = ctypes.cast(address + 4 * index, ctypes.POINTER(ctypes.c_int32))
        self.struct = lib.llama_batch(
            n_tokens=0,
            token=self.token,
            embd=None,
            pos=self.position,
            n_seq_id=self._ones,
            seq_id=self._lists,
            logits=self.logits,
        )

    def fill(self, chunks: Sequence[Chunk], *, all_outputs: bool = False) -> dict[int, range]:
        """Write the chunks' tokens; return by slot the indices of its tokens with logits, if any.

        With *all_outputs* every token has an output. With `check_chunks`, this takes 13 µs for
        16 chunks of one token, and as much for one chunk of 128.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        outputs: list[int] = []
        logits: dict[int, range] = {}
        for chunk in chunks:
            count = len(chunk.tokens)
            tokens += chunk.tokens
            positions += range(chunk.position, chunk.position + count)
            slots += (chunk.slot,) * count
            if chunk.logits:
                logits[chunk.slot] = range(len(tokens) - chunk.logits, len(tokens))
                outputs += logits[chunk.slot]
        total = len(tokens)
        self.token[:total], self.position[:total], self.slot[:total] = tokens, positions, slots
        ctypes.memset(self.logits, int(all_outputs), total)
        for index in outputs:
            self.logits[index] = 1
        self.struct.n_tokens = total
        return logits

    def of_embeddings(
        self, rows: NDArray[np.float32], positions: NDArray[np.int32], slot: int, *, logits: bool
    ) -> Any:
        """Return a batch of embeddings, one a row, for *slot*. The *positions* have a row for each
        section. *logits* are those of the last one. The caller keeps the arrays alive.
        """
        total = len(rows)
        self.slot[:total] = (slot,) * total
        ctypes.memset(self.logits, 0, total)
        self.logits[total - 1] = int(logits)
        return lib.llama_batch(
            n_tokens=total,
            token=None,
            embd=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._ones,
            seq_id=self._lists,
            logits=self.logits,
        )


class OwnedContext:
    """A context of llama.cpp that its object frees, with its compute threads. Owned by one thread;
    the model must outlive it.
    """

    def __init__(self, pointer: Any):
        self.pointer = pointer
        self._threads = ComputeThreads(pointer)

    def set_threads(self, threads: int) -> None:
        """Use this many threads from the next step on."""
        self._threads.set_count(threads)

    def close(self) -> None:
        """Free the context; a second call does nothing."""
        pointer, self.pointer = self.pointer, None
        if pointer is not None:
            lib.llama_free(pointer)
            self._threads.close()


@dataclass(slots=True)
class _KeptState:
    """The part of a slot's state that cannot be cut, as it was with *length* tokens; 0: none."""

    data: NDArray[np.uint8]
    length: int = 0

    @property
    def pointer(self) -> Any:
        """A pointer to the data, for llama.cpp."""
        return self.data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class _Header(NamedTuple):
    """The beginning of a saved state: the *length* of the slot, the header's *size*, and the
    positions of the slot's items.
    """

    length: int
    size: int
    places: SlotPositions


class LlamaContext(OwnedContext):
    """The slots of one context. With *reads_media* it reads the embeddings of images and sounds."""

    media: MediaFormat | None = None
    """The embeddings that it reads."""

    def __init__(
        self,
        pointer: Any,
        model: Any,
        *,
        vocab_size: int,
        fingerprint: str,
        logits_max: int,
        reads_media: bool = False,
        keeps_states: bool = False,
    ):
        super().__init__(pointer)
        self.logits_max = logits_max
        self.memory = lib.llama_get_memory(pointer)
        self.slots = int(lib.llama_n_seq_max(pointer))
        size = int(lib.llama_n_ctx_seq(pointer))
        self.ctx_size = min(size, positions_max(model) or size)
        self.batch_size = int(lib.llama_n_batch(pointer))
        self._vocab_size = vocab_size
        self._key = bytes.fromhex(fingerprint)[:16]
        self._window = int(lib.llama_model_n_swa(model))
        self._hybrid = bool(lib.llama_model_is_hybrid(model))
        self._whole_only = self._hybrid or bool(lib.llama_model_is_recurrent(model))
        self.rollback = int(lib.llama_n_rs_seq(pointer)) if self._whole_only else 0
        self.keeps_states = keeps_states and self._whole_only and not self.rollback
        self._kept = dict[int, _KeptState]()
        """By slot, the state that `keep_state` has kept. The memory is used again."""
        self._can_roll_back = dict[int, int]()
        """By slot, the tokens of whose states the last decode has kept those before them."""
        # A hybrid reports that it can shift, but would move only the cells of its attention.
        self.can_shift = bool(lib.llama_memory_can_shift(self.memory)) and not self._whole_only
        mrope = lib.llama_model_rope_type(model) in _MROPE
        if reads_media:
            size_max = min(self.batch_size, int(lib.llama_n_ubatch(pointer)))
            self.media = MediaFormat(int(lib.llama_model_n_embd_inp(model)), mrope, size_max)
        self._places = dict[int, SlotPositions]()
        """By slot, the positions of its items, if the model has M-RoPE."""
        if mrope:
            self._places = {slot: SlotPositions() for slot in range(self.slots)}
        self._lengths = dict.fromkeys(range(self.slots), 0)
        self._shifted: set[int] = set()
        self._batch = Batch(self.batch_size)
        self._views: dict[int, NDArray[np.float32]] = {}
        """Views of logits by their address: creating one takes 30 us."""

    @property
    def kv_kind(self) -> KvKind:
        """The kind of the KV states."""
        if self._whole_only:
            return "hybrid" if self._hybrid else "recurrent"
        return "window" if self._window > 0 else "plain"

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds."""
        return self._lengths[self._checked(slot)]

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Check a batch; see `check_chunks`."""
        check_chunks(
            chunks,
            self._lengths,
            self.batch_size,
            self.ctx_size,
            self._vocab_size,
            self.logits_max,
            self.media,
        )
        for chunk in chunks:
            places = self._places.get(chunk.slot)
            if places is not None and places.next_offset(chunk.position) != chunk.offset:
                raise BackendError(f"slot {chunk.slot} holds a part of a media item")

    def decode(self, chunks: Sequence[Chunk]) -> dict[int, range]:
        """Decode a checked batch; return by slot the indices of its logits until the next decode.
        The last index is that of the chunk's last token.
        """
        if chunks[0].media is not None:
            logits, result = self._decode_item(chunks[0], chunks[0].media)
        else:
            logits = self._batch.fill(self._placed(chunks))
            result = self._threads.decode(self._batch.struct)
        if result in (0, _NO_CELLS):
            self._shifted.clear()
        self._can_roll_back.clear()
        if result != 0:
            raise self._failure(result, [chunk.slot for chunk in chunks])
        for chunk in chunks:
            self._lengths[chunk.slot] = chunk.position + len(chunk.tokens)
            if self.rollback and chunk.media is None:
                # The state before the chunk itself is not kept, and llama.cpp does not check that.
                self._can_roll_back[chunk.slot] = min(self.rollback, len(chunk.tokens) - 1)
        return logits

    def _placed(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Return the chunks with the positions that llama.cpp uses."""
        if not self._places:
            return chunks
        return [
            msgspec.structs.replace(c, position=self._places[c.slot].after(c.position))
            for c in chunks
        ]

    def _decode_item(self, chunk: Chunk, media: MediaInput) -> tuple[dict[int, range], int]:
        """Decode entries of an item; return what `decode` does, and llama.cpp's result.

        :raises BackendError: the embeddings or the places are not possible; nothing was computed.
        """
        assert self.media is not None, "the batch was checked"
        count, slot = len(chunk.tokens), chunk.slot
        part = slice(chunk.offset, chunk.offset + count)
        rows = np.frombuffer(media.embeddings, np.float32).reshape(media.size, self.media.width)
        rows = np.ascontiguousarray(rows[part])
        if not np.isfinite(rows).all():
            raise BackendError("the embeddings of a media item are not numbers")
        positions, span = self._positions_of(chunk, media, part)
        batch = self._batch.of_embeddings(rows, positions, slot, logits=chunk.logits > 0)
        # The setting holds for the whole context, so it must not outlive the step.
        try:
            if not media.causal:
                lib.llama_set_causal_attn(self.pointer, False)
            result = self._threads.decode(batch)
        finally:
            if not media.causal:
                lib.llama_set_causal_attn(self.pointer, True)
        if result == 0 and span is not None:
            self._places[slot].add(span)
        return ({slot: range(count - 1, count)} if chunk.logits else {}), result

    def _positions_of(
        self, chunk: Chunk, media: MediaInput, part: slice
    ) -> tuple[NDArray[np.int32], Span | None]:
        """Return the positions of the chunk's entries, a row for each section, and with M-RoPE the
        entries of the item that the slot then has.
        """
        count = len(chunk.tokens)
        if media.places is None:
            first = chunk.position
            return np.arange(first, first + count, dtype=np.int32).reshape(1, count), None
        places = np.frombuffer(media.places, np.int32).reshape(media.size, _SECTIONS)
        times = places[:, 0]
        possible = places.min() >= 0 and places.max() < media.positions
        if not possible or times[0] != 0 or (np.diff(times) < 0).any():
            raise BackendError("the places of a media item are not possible")
        begin = chunk.position - chunk.offset
        positions = places[part].T + np.int32(self._places[chunk.slot].after(begin))
        if not places[:, 3].any():  # an image's last section is 0 in the whole context
            positions[3] = 0
        span = Span(begin, part.stop, media.size, media.positions, int(times[part.stop - 1]))
        return np.ascontiguousarray(positions, np.int32), span

    def _failure(self, result: int, slots: Sequence[int]) -> BackendError:
        """Measure the lengths of a failed batch's slots, and return the error."""
        reason = _DECODE_ERRORS.get(result, "llama.cpp failed to compute")
        message = f"{reason} (llama_decode returned {result})"
        # llama.cpp claims to restore the slots; the actual contents are queried here too.
        if result == _NO_CELLS and all(self._is_complete(s, self._lengths[s]) for s in slots):
            return KvFull(message)
        for slot in slots:
            if self._places:  # entries cannot be told from positions
                self.clear(slot)
            self._lengths[slot] = self._positions(slot)[1] + 1
        return BackendError(message)

    def logits_at(self, index: int) -> NDArray[np.float32]:
        """Return a view of the logits of token *index* of the last batch, valid until the next."""
        pointer = lib.llama_get_logits_ith(self.pointer, index)
        if not pointer:
            raise BackendError(f"token {index} of the last batch has no logits")
        address = ctypes.addressof(pointer.contents)
        view = self._views.get(address)
        if view is None:
            if len(self._views) >= self.logits_max:
                self._views.clear()
            view = self._views[address] = np.ctypeslib.as_array(pointer, (self._vocab_size,))
        return view

    def sample(self, chain: Any, index: int) -> int:
        """Sample a token with a *chain* from the logits of token *index* of the last batch."""
        return int(lib.llama_sampler_sample(chain, self.pointer, index))

    def clear(self, slot: int) -> None:
        """Clear one slot; clearing all slots at once would break recurrent memory."""
        lib.llama_memory_seq_rm(self.memory, self._checked(slot), -1, -1)
        self._set_length(slot, 0)
        self._shifted.discard(slot)
        self._can_roll_back.pop(slot, None)

    def _set_length(self, slot: int, length: int) -> None:
        self._lengths[slot] = length
        if (kept := self._kept.get(slot)) is not None and kept.length > length:
            kept.length = 0
        if self._places:
            self._places[slot].cut(length)

    def _position_after(self, slot: int, length: int) -> int:
        """Return the position of the token after the first *length*."""
        return self._places[slot].after(length) if self._places else length

    def trim(self, slot: int, keep: int) -> int:
        """Drop all but the first *keep* tokens; see `LanguageModel.trim`."""
        length = self.length(slot)
        if 0 < length <= keep:
            return length
        inside = self._places and not self._places[slot].is_border(keep)
        # A state that was rolled back once has no earlier ones.
        able = not self._whole_only or length - keep <= self._can_roll_back.pop(slot, 0)
        if keep > 0 and able and not inside:
            lib.llama_memory_seq_rm(self.memory, slot, self._position_after(slot, keep), -1)
            if self._is_complete(slot, keep):
                self._set_length(slot, keep)
                return keep
        if not self._go_back(slot, keep):
            self.clear(slot)
        return self._lengths[slot]

    def keep_state(self, slot: int) -> None:
        """Keep the part of a slot's state that cannot be cut, for `trim` to go back to, until the
        slot has fewer tokens or another state is kept.
        """
        length = self.length(slot)
        if not self.keeps_states or not length:
            return
        size = int(lib.llama_state_seq_get_size_ext(self.pointer, slot, self._part))
        kept = self._kept.get(slot)
        if kept is None or len(kept.data) != size:
            kept = self._kept[slot] = _KeptState(np.empty(size, np.uint8))
        kept.length = 0
        written = lib.llama_state_seq_get_data_ext(
            self.pointer, kept.pointer, size, slot, self._part
        )
        if written != size:
            raise BackendError(f"slot {slot} could not be saved: {written} of {size} bytes")
        kept.length = length

    def forget_states(self, except_of: Collection[int]) -> None:
        """Forget the states that were kept, except those of some slots."""
        for slot, kept in self._kept.items():
            if slot not in except_of:
                kept.length = 0

    @property
    def _part(self) -> int:
        """The flags of the part of a state that cannot be cut."""
        return int(lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) if self._hybrid else _WHOLE

    def _go_back(self, slot: int, keep: int) -> bool:
        """Go back to the kept state of a slot, if that has at most *keep* tokens. Return whether
        the slot then has these tokens; else it must be cleared.
        """
        kept = self._kept.get(slot)
        if kept is None or not 0 < kept.length <= keep:
            return False
        size, length = len(kept.data), kept.length
        read = lib.llama_state_seq_set_data_ext(self.pointer, kept.pointer, size, slot, self._part)
        if read != size or not self._cut_attention(slot, length):
            return False
        self._set_length(slot, length)
        return True

    def _cut_attention(self, slot: int, length: int) -> bool:
        """Remove the attention's cells of a hybrid behind the first *length* tokens, after which
        the recurrent part was saved that was just read into the slot. Return whether both parts
        then end there.

        Only now can the cells be removed, since a hybrid's `seq_rm` refuses to cut the recurrent
        part (`llama_memory_hybrid::seq_rm`), or would roll another state back.
        """
        if self._positions(slot)[1] != self._last_position(slot, length):
            return False  # the least last position of both parts
        after = self._position_after(slot, length)
        cut = not self._hybrid or lib.llama_memory_seq_rm(self.memory, slot, after, -1)
        return bool(cut) and self._is_complete(slot, length)

    def trim_min(self, slot: int) -> int:
        """Return the least number of tokens that `trim` can leave; see `LanguageModel.trim_min`."""
        length = self.length(slot)
        if self._whole_only:
            return length
        first = self._positions(slot)[0] if self._window else 0
        if first <= 0:
            return min(length, 1)
        least = first + self._window
        return min(length, self._places[slot].least_length(least) if self._places else least)

    def _last_position(self, slot: int, length: int) -> int:
        """Return the position of the last of the first *length* tokens."""
        return self._places[slot].last_cell(length) if self._places else length - 1

    def _is_complete(self, slot: int, length: int) -> bool:
        """Return whether the slot has all cells that the token after *length* attends to.

        llama.cpp (`llama_kv_cache::apply_ubatch`) and `move` leave no gaps between the first cell
        and the last.
        """
        first, last = self._positions(slot)
        after = self._position_after(slot, length)
        needed = max(0, after - self._window) if self._window else 0
        if last != self._last_position(slot, length):
            return False
        return self._whole_only or not length or 0 <= first <= needed

    def move(self, slot: int, moves: Sequence[Move]) -> None:
        """Move runs of tokens down and drop all others; see `LanguageModel.reuse`.

        This does what llama-server's cache reuse and context shift do. llama.cpp changes the
        cells' positions at once, but rotates their keys at the context's next decode, for whichever
        slot, even if that finds no cells (`llama_context::decode`). A state saved in between has
        new positions with old keys and gives no error, but its logits are off by 0.7 to 1.7
        (measured on models with a noise of 1e-4). So such a slot is not saved until then. Other
        slots can be saved, and stay the same bit for bit. Clearing or restoring a slot ends the
        wait, as empty cells are not rotated; trimming it does not end the wait.

        :raises UnsupportedOperation: the memory cannot be shifted.
        :raises BackendError: *moves* are wrong, and nothing has changed; or cells are missing,
            and the slot is then empty.
        """
        if not self.can_shift:
            raise UnsupportedOperation(
                f"the context cannot be shifted: {_NO_SHIFT[self.kv_kind]}",
                hint="turn ctx-shift and cache-reuse off",
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
            raise BackendError(f"slot {slot} lost cells in the window of the moved tokens")

    def _positions(self, slot: int) -> tuple[int, int]:
        return (
            int(lib.llama_memory_seq_pos_min(self.memory, slot)),
            int(lib.llama_memory_seq_pos_max(self.memory, slot)),
        )

    def save(self, slot: int) -> bytes:
        """Return the state of a slot, after a header with the model's key and the length."""
        return self._save(slot, _WHOLE)

    def save_checkpoint(self, slot: int) -> bytes:
        """Return the recurrent part of a slot's state, after a header as in `save`."""
        if not self._whole_only:
            raise UnsupportedOperation(
                f"a {self.kv_kind} memory has no checkpoints", hint="save the whole state"
            )
        return self._save(slot, self._part)

    def _save(self, slot: int, flags: int) -> bytes:
        length = self.length(slot)
        if slot in self._shifted:
            raise BackendError(f"slot {slot} was shifted and not decoded into since")
        size = lib.llama_state_seq_get_size_ext(self.pointer, slot, flags) if length else 0
        header = _STATE.pack(self._magic, self._key, length, flags)
        if self._places:
            header += self._places[slot].pack()
        # The only way to let llama.cpp write into `bytes`, without a copy of 20 kB per token.
        state: bytes = _new_bytes(None, len(header) + size)
        ctypes.memmove(_at(state, 0), header, len(header))
        if size:
            written = lib.llama_state_seq_get_data_ext(
                self.pointer, _at(state, len(header)), size, slot, flags
            )
            if written != size:
                raise BackendError(f"slot {slot} could not be saved: {written} of {size} bytes")
        return state

    @property
    def _magic(self) -> bytes:
        return _MROPE_MAGIC if self._places else _STATE_MAGIC

    def restore(self, slot: int, state: bytes) -> bool:
        """Load a saved state into a slot; return False, with the slot empty, if it does not fit."""
        self.clear(slot)
        header = self._read_header(state, _WHOLE)
        if header is None or not header.length:
            return header is not None and len(state) == header.size
        if self._places:
            self._places[slot] = header.places
        if not self._read(slot, state, header.size, _WHOLE) or not self._is_complete(
            slot, header.length
        ):
            self.clear(slot)
            return False
        self._lengths[slot] = header.length
        return True

    def restore_checkpoint(self, slot: int, checkpoint: bytes) -> bool:
        """Cut a hybrid's slot back to a checkpoint; see `LanguageModel.restore_checkpoint`."""
        flags = self._part
        header = self._read_header(checkpoint, flags) if self._hybrid else None
        fits = (
            header is not None
            and 0 < header.length <= self.length(slot)
            and self._read(slot, checkpoint, header.size, flags)
            and self._cut_attention(slot, header.length)
        )
        if not fits or header is None:
            self.clear(slot)
            return False
        self._set_length(slot, header.length)
        self._can_roll_back.pop(slot, None)
        return True

    def _read_header(self, state: bytes, flags: int) -> _Header | None:
        """Return the header of a state of this model; None if it is of another."""
        if len(state) < _STATE.size:
            return None
        magic, key, length, saved_flags = _STATE.unpack_from(state)
        own = (magic, key, saved_flags) == (self._magic, self._key, flags)
        if not own or not 0 <= length <= self.ctx_size:
            return None
        if not self._places:
            return _Header(length, _STATE.size, SlotPositions())
        found = SlotPositions.unpack(state, _STATE.size, length)
        return None if found is None else _Header(length, found[1], found[0])

    def _read(self, slot: int, state: bytes, offset: int, flags: int) -> bool:
        size = len(state) - offset
        read = lib.llama_state_seq_set_data_ext(self.pointer, _at(state, offset), size, slot, flags)
        return bool(read == size)

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots by saving and restoring both.

        :raises BackendError: a slot cannot be saved, and nothing has changed; or a state cannot be
            restored, and both slots are then empty.
        """
        states = ((b, self.save(a)), (a, self.save(b)))
        restored = [self.restore(slot, state) for slot, state in states]
        if not all(restored):
            self.clear(a)
            self.clear(b)
            raise BackendError(f"the slots {a} and {b} could not be exchanged")

    def set_thread_counts(self, single: int, batch: int) -> None:
        """Use these numbers of threads for one token and for several, from the next decode on."""
        self._threads.set_counts(single, batch)

    def _checked(self, slot: int) -> int:
        # llama.cpp aborts the process for an unknown sequence.
        if not 0 <= slot < self.slots:
            raise BackendError(f"slot {slot} is not one of {self.slots}")
        return slot


class EncoderContext(LlamaContext):
    """Stands in for the context of an encoder, which has no KV state and only makes embeddings: its
    slots stay empty.
    """

    def __init__(self, slots: int, ctx_size: int, batch_size: int, fingerprint: str):
        self.pointer, self.logits_max = None, 0
        self.slots, self.ctx_size, self.batch_size = slots, ctx_size, batch_size
        self.can_shift, self.rollback, self._can_roll_back = False, 0, {}
        self.keeps_states, self._kept = False, {}
        self._key = bytes.fromhex(fingerprint)[:16]
        self._window, self._hybrid, self._whole_only = 0, False, False
        self._lengths = dict.fromkeys(range(slots), 0)
        self._places = {}
        self._shifted: set[int] = set()

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Refuse every batch."""
        raise UnsupportedOperation(
            "the model only makes embeddings", hint="use embed, or another model"
        )

    def clear(self, slot: int) -> None:
        """Do nothing: every slot is empty."""
        self._checked(slot)

    def set_threads(self, threads: int) -> None:
        """Do nothing: this context computes nothing."""
