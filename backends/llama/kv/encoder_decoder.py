"""The contexts of an encoder-decoder: a llama.cpp context for each slot.

llama.cpp keeps the output of one encoding in a context, and each decoding reads it
(`llama_context::cross`). A second encoding replaces it, and the sequences of the first one would
attend to nothing. With several sequences in split KV, the positions of T5 end the process
(`llama_kv_cache::set_input_pos_bucket`), as does a decoding before the first encoding.

So slots share only the weights. They lose little by that, because llama.cpp computes the keys and
values of the encoder's output again in each step. With a model of Flan-T5 small's size, a step of
four sequences in one context takes 0.81 of the time of four steps with prompts of 20 tokens, 0.95
with 100, and 1.0 with 400. Encoding four prompts together takes 0.9, 1.4 and 2.1 of the time.

The encoder's output is not in llama.cpp's states. The states here have the tokens of the prompt,
which a restored slot encodes again in its next step.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from ...base import KvKind
from ...batch import Chunk, Move, check_chunks
from ...errors import BackendError, UnsupportedOperation
from .context import LlamaContext

_PROMPT = struct.Struct("<4si")
_PROMPT_MAGIC = b"ifep"


class SlotContext(LlamaContext):
    """One slot: llama.cpp's context with the decoder's tokens, and the encoder's tokens."""

    def __init__(self, pointer: Any, model: Any, *, vocab_size: int, fingerprint: str):
        batch_size = int(lib.llama_n_batch(pointer))
        super().__init__(
            pointer, model, vocab_size=vocab_size, fingerprint=fingerprint, logits_max=batch_size
        )
        # llama.cpp ends the process for a prompt that exceeds a micro-batch.
        self.batch_size = min(batch_size, int(lib.llama_n_ubatch(pointer)))
        self.prompt = array("i")
        self._encoded = False

    @property
    def tokens(self) -> int:
        """The number of tokens of both parts."""
        return len(self.prompt) + self.length(0) if self.prompt else 0

    def set_prompt(self, prompt: Sequence[int]) -> None:
        """Replace the contents by a *prompt*, which the next step encodes."""
        self.clear(0)
        self.prompt, self._encoded = array("i", prompt), False

    def decode_chunk(self, chunk: Chunk) -> range | None:
        """Decode a chunk of the decoder's tokens; return the indices of its logits, if any."""
        if not self._encoded:
            self._encode()
        return self.decode([chunk]).get(0)

    def _encode(self) -> None:
        # llama.cpp wants positions behind those in the memory; the encoder reads only distances.
        self._batch.fill([Chunk(0, self.prompt, self.length(0), 0)], all_outputs=True)
        result = self._threads.encode(self._batch.struct)
        if result != 0:
            raise BackendError(f"llama.cpp failed to encode a prompt (llama_encode: {result})")
        self._encoded = True


class EncoderDecoderContext(LlamaContext):
    """The slots of an encoder-decoder, with the interface of one context.

    The first chunk of a slot is a whole prompt: the encoder's tokens, then *start_token*, the
    decoder's first one. Positions and lengths count both parts.
    """

    def __init__(
        self,
        open_slot: Callable[[], SlotContext],
        slots: int,
        *,
        start_token: int,
        vocab_size: int,
        logits_max: int,
    ):
        self.pointer, self.logits_max, self.slots = None, logits_max, slots
        self.can_shift = self._hybrid = self._whole_only = False
        self._places, self.rollback, self._kept, self.keeps_states = {}, 0, {}, False
        self._start_token, self._vocab_size = start_token, vocab_size
        self._opened: list[SlotContext] = []
        try:
            for _ in range(slots):
                self._opened.append(open_slot())
        except BaseException:
            self.close()
            raise
        self._slots = list(self._opened)
        """By slot; those that were exchanged are in another order than they were opened."""
        self.ctx_size, self.batch_size = self._opened[0].ctx_size, self._opened[0].batch_size

    def close(self) -> None:
        """Free all contexts; a second call does nothing."""
        for context in self._opened:
            context.close()

    @property
    def kv_kind(self) -> KvKind:
        """The kind of the KV states: as those with a window, they can be cut down to `trim_min`."""
        return "window"

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds."""
        return self._slots[self._checked(slot)].tokens

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Check a batch; see `check_chunks`. A prompt is one chunk with the start token at its end.

        :raises BackendError: the batch is wrong.
        """
        lengths = {slot: context.tokens for slot, context in enumerate(self._slots)}
        check_chunks(
            *(chunks, lengths, self.batch_size, self.ctx_size, self._vocab_size, self.logits_max)
        )
        for chunk in chunks:
            if chunk.position:
                continue
            if len(chunk.tokens) < 2 or chunk.tokens[-1] != self._start_token or chunk.logits > 1:
                raise BackendError(
                    f"the first chunk of slot {chunk.slot} is not a prompt that ends with token"
                    f" {self._start_token}"
                )

    def decode(self, chunks: Sequence[Chunk]) -> dict[int, range]:
        """Compute a checked batch, one slot after the other; see `LlamaContext.decode`."""
        logits: dict[int, range] = {}
        for chunk in chunks:
            context, tokens = self._slots[chunk.slot], chunk.tokens
            if not chunk.position:
                context.set_prompt(tokens[:-1])
                tokens = tokens[-1:]
            found = context.decode_chunk(Chunk(0, tokens, context.length(0), chunk.logits))
            if found is not None:
                begin = self._opened.index(context) * self.batch_size
                logits[chunk.slot] = range(begin + found.start, begin + found.stop)
        return logits

    def _of_index(self, index: int) -> tuple[SlotContext, int]:
        """Return the context of the logits with this index, and their index in it."""
        number, index = divmod(index, self.batch_size)
        return self._opened[number], index

    def logits_at(self, index: int) -> NDArray[np.float32]:
        """Return a view of the logits with this index, valid until the slot's next step."""
        context, index = self._of_index(index)
        return context.logits_at(index)

    def sample(self, chain: Any, index: int) -> int:
        """Sample a token from the logits with this index."""
        context, index = self._of_index(index)
        return context.sample(chain, index)

    def clear(self, slot: int) -> None:
        self._slots[self._checked(slot)].set_prompt(())

    def trim(self, slot: int, keep: int) -> int:
        """Drop all but the first *keep* tokens; a part of a prompt cannot be kept."""
        context = self._slots[self._checked(slot)]
        if 0 < context.tokens <= keep:
            return context.tokens
        kept = keep - len(context.prompt)
        if context.prompt and kept > 0 and context.trim(0, kept) == kept:
            return keep
        context.set_prompt(())
        return 0

    def trim_min(self, slot: int) -> int:
        """Return the least number of tokens that `trim` can leave: the prompt's."""
        context = self._slots[self._checked(slot)]
        return min(context.tokens, len(context.prompt) + 1)

    def move(self, slot: int, moves: Sequence[Move]) -> None:
        """Refuse it: the decoder's keys have no positions that could be changed."""
        raise UnsupportedOperation(
            "an encoder-decoder encodes each prompt whole, and its context cannot be shifted",
            hint="turn ctx-shift and reuse off",
        )

    def save(self, slot: int) -> bytes:
        """Return the prompt's tokens and the decoder's state."""
        context = self._slots[self._checked(slot)]
        head = _PROMPT.pack(_PROMPT_MAGIC, len(context.prompt))
        return head + context.prompt.tobytes() + context.save(0)

    def restore(self, slot: int, state: bytes) -> bool:
        """Load a saved state into a slot; return False, with the slot empty, if it does not fit."""
        context = self._slots[self._checked(slot)]
        context.set_prompt(())
        if len(state) < _PROMPT.size:
            return False
        magic, count = _PROMPT.unpack_from(state)
        prompt = array("i")
        end = _PROMPT.size + count * prompt.itemsize
        if magic != _PROMPT_MAGIC or not 0 <= count < self.batch_size or end > len(state):
            return False
        prompt.frombytes(state[_PROMPT.size : end])
        # llama.cpp would abort for a token that is not in the vocabulary.
        if count and not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            return False
        if not context.restore(0, state[end:]):
            return False
        length = context.length(0)
        if bool(count) != bool(length) or count + length > self.ctx_size:
            context.set_prompt(())
            return False
        context.prompt = prompt
        return True

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots; nothing is copied."""
        slots = self._slots
        slots[self._checked(a)], slots[self._checked(b)] = slots[b], slots[a]

    def set_threads(self, threads: int) -> None:
        """Use this many threads from the next step on."""
        for context in self._opened:
            context.set_threads(threads)
