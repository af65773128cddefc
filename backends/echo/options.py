"""The echo model's options (its size, its kind of memory, its faults), with its vocabulary, the
faults, and the memory that it claims.

- Time: `load_ms` is that of the load. A step takes `step_ms` for each length of its chunks, since
  llama.cpp, too, has a pass for each. Tokenizing takes `tokenize_ms` for each 1000 bytes. Sampling
  takes `sample_ms` of CPU time in slots with the text `slow_on`; if it is empty, in all.
- Faults: the process aborts at step number `crash_at_step`, and step number `fail_at_step` fails.
  The process also aborts in the step that decodes the text `abort_on`; or, as `abort_in` requests,
  when it samples by a grammar with this text, or tokenizes the text.
- Memory: `memory` sets its kind, `window` its attention window in tokens, and `kv_cells` the cells
  that all slots share. One that is recurrent or hybrid drops `rollback` tokens of a step, or with
  `keeps_states` goes back to before it. The model claims to need `weight_bytes`, `token_bytes` for
  each token of a slot's context, `layer_bytes` for each of `layers`, which run on devices with
  `device_bytes` free, `embedding_bytes` once it makes embeddings, and `probe_bytes` while its
  settings are measured. It allocates nothing.
- Settings: a probe takes `probe_ms`, and `probe_share` of it with flash attention, of which the
  model has only the name. If `probe_ms` is negative, there is no other setting.
- Tokens: the characters of `surprising` have a surprisal of ten nats, all others zero. In a turn
  with a grammar, the end and the characters of `forced`, which adapters must not change, are
  forced; without `forced`, nothing is.
- Images and sounds: with `media`, any bytes are one, of `media_tiles` items. The encoder process
  aborts at a content with the text `media_abort_on`, when it reads or encodes it, as
  `media_abort_in` requests. An encoding waits until the FIFO `media_gate` was opened for writing
  and closed. The model ignores the embeddings, and repeats only the text beside them. An item whose
  entries see each other fits in a batch.
- Reranking: with `ranks`, embeddings are scores, and a score is the first number of the vector.
- Drafts: with `draft_errs` of 0 or more, the model has a draft model, whose every prediction number
  `draft_errs` is wrong; with 0, none is. Its step takes `draft_ms`, step number `draft_fail_at`
  fails, and the model claims to need `draft_bytes` for it. With `draft_whole` its states cannot be
  cut, as those of recurrent models.
- Kind: `variant` (a text) changes the model's fingerprint. `vocabulary` (a number) changes its
  vocabulary, in which it is the token of byte 0. `tool_format` names the form of its answers. With
  `fim` it fills in the text between a prefix and a suffix with both, and `|` between them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Literal

import msgspec

from ..base import KvKind
from ..errors import BackendError
from ..memory import Device, MemoryNeed, check_devices, layers_on_devices
from ..model_spec import ModelSpec, Shape
from ..tool_formats import KNOWN_FORMS

_FORM_NAME = rf"^({'|'.join(KNOWN_FORMS)})\Z"
EOG, PROMPT_END, PROMPT_BEGIN = 256, 257, 258
VOCAB_SIZE = 259
_NAMES = {EOG: b"", PROMPT_END: b"<|echo|>", PROMPT_BEGIN: b"<|prompt|>"}
_MARKS = {name: token for token, name in _NAMES.items() if name}
_MARK = re.compile(b"(%s)" % b"|".join(map(re.escape, _MARKS)))


class EchoVocabulary:
    """A token per byte, of which byte 0 is the token *first*, and three marks, for the start of a
    prompt, its end, and the end of an answer.
    """

    def __init__(self, first: int):
        self._first = first

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        """Return the tokens of *text*, with marks around them if *bos* or *special*. If *special*
        and the text begins with the mark of a prompt, the marks in it are read instead.
        """
        if special and text.startswith(_NAMES[PROMPT_BEGIN]):
            return [token for part in _MARK.split(text) for token in self._tokens_of(part)]
        tokens = [self.token(byte) for byte in text]
        return [PROMPT_BEGIN, *tokens, PROMPT_END] if bos or special else tokens

    def _tokens_of(self, part: bytes) -> list[int]:
        return [_MARKS[part]] if part in _MARKS else [self.token(byte) for byte in part]

    def token(self, byte: int) -> int:
        return (byte + self._first) % EOG

    def byte(self, token: int) -> int:
        """Return the byte of *token*, which is not a mark."""
        return (token - self._first) % EOG

    def piece(self, token: int) -> bytes:
        """Return the byte of *token*, or a mark's name; the end mark's is empty."""
        return bytes((self.byte(token),)) if token < EOG else _NAMES[token]

    def is_control(self, token: int) -> bool:
        """Return whether *token* is a mark."""
        return token >= EOG

    def is_eog(self, token: int) -> bool:
        """Return whether *token* is the end mark."""
        return token == EOG

    def text(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of *tokens*, without marks."""
        return bytes(self.byte(t) for t in tokens if 0 <= t < EOG)


def next_token(tokens: Sequence[int]) -> int:
    """Return the token that the echo model generates after *tokens*."""
    if PROMPT_END not in tokens:
        return EOG
    end = len(tokens) - 1 - tokens[::-1].index(PROMPT_END)
    before = tokens[:end]
    begin = len(before) - before[::-1].index(PROMPT_BEGIN) if PROMPT_BEGIN in before else 0
    answered = len(tokens) - end - 1
    return tokens[begin + answered] if begin + answered < end else EOG


ECHO_CTX_SIZE = 4096
Milliseconds = Annotated[float, msgspec.Meta(ge=-1, le=1e9)]
Number = Annotated[int, msgspec.Meta(ge=-1, le=10**9)]
Bytes = Annotated[int, msgspec.Meta(ge=-1, le=10**15)]


class EchoOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The keys of `ModelSpec.options`; -1 and the empty text turn an option off."""

    step_ms: Milliseconds = 0.0
    load_ms: Milliseconds = 0.0
    tokenize_ms: Milliseconds = 0.0
    sample_ms: Milliseconds = 0.0
    slow_on: str = ""
    crash_at_step: Number = -1
    fail_at_step: Number = -1
    abort_on: str = ""
    abort_in: Literal["step", "grammar", "tokenize"] = "step"
    surprising: str = ""
    forced: str = ""
    variant: str = ""
    vocabulary: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    fim: bool = False
    tool_format: Annotated[str, msgspec.Meta(pattern=_FORM_NAME)] = "none"
    memory: KvKind = "plain"
    window: Annotated[int, msgspec.Meta(ge=1, le=10**9)] = 8
    rollback: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    keeps_states: bool = False
    kv_cells: Number = -1
    weight_bytes: Bytes = 0
    token_bytes: Bytes = 0
    embedding_bytes: Bytes = 0
    probe_bytes: Bytes = 0
    probe_ms: Milliseconds = -1
    probe_share: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    layers: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    layer_bytes: Bytes = 0
    device_bytes: tuple[int, ...] = ()
    ranks: bool = False
    draft_errs: Number = -1
    draft_ms: Milliseconds = 0.0
    draft_fail_at: Number = -1
    draft_whole: bool = False
    draft_bytes: Bytes = 0
    media: bool = False
    media_tiles: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    media_abort_on: str = ""
    media_abort_in: Literal["read", "encode"] = "encode"
    media_gate: str = ""


class EchoFaults:
    """Counts the steps of both contexts, and pauses or breaks them as the options request."""

    def __init__(self, options: EchoOptions, vocabulary: EchoVocabulary):
        self.steps = 0
        self._options, self._vocabulary = options, vocabulary

    def count_step(self, passes: int = 1) -> None:
        """Count a step, pause for each of its *passes*, and fail if the options request it."""
        self.steps += 1
        if self._options.step_ms:
            time.sleep(passes * self._options.step_ms / 1000)
        if self.steps == self._options.crash_at_step:
            os.abort()
        if self.steps == self._options.fail_at_step:
            raise BackendError(f"step {self.steps} failed, as requested by fail_at_step")

    def sample_slowly(self, tokens: Sequence[int]) -> None:
        """Use the CPU for `sample_ms` if a slot's *tokens* contain the text of `slow_on`."""
        seconds = self._options.sample_ms / 1000
        if seconds > 0 and self._options.slow_on.encode() in self._vocabulary.text(tokens):
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass

    def abort_on_tokens(self, tokens: Sequence[int]) -> None:
        """Abort the process if a slot's *tokens* contain the text of the option `abort_on`."""
        if self._options.abort_on and self._options.abort_in == "step":
            self.abort_on_text("step", self._vocabulary.text(tokens))

    def abort_on_text(self, place: str, text: bytes) -> None:
        """Abort the process if *text* contains that of `abort_on`, and `abort_in` is *place*."""
        options = self._options
        if options.abort_on and options.abort_in == place and options.abort_on.encode() in text:
            os.abort()


class EchoMemoryEstimator:
    """The echo model's `MemoryEstimator`; it returns the numbers of the options."""

    def __init__(self, spec: ModelSpec):
        self._options = msgspec.convert(spec.options, EchoOptions)
        layers = layers_on_devices(spec, self._options.layers, self._options.device_bytes)
        ctx_size = spec.ctx_size or ECHO_CTX_SIZE
        self.shape = Shape(spec.slots, ctx_size, spec.batch_size, layers)
        self._split = spec.tensor_split or self._options.device_bytes
        self._main = spec.main_gpu
        check_devices(spec, self.devices)

    @property
    def devices(self) -> list[Device]:
        """The options' devices, whose memory is always free."""
        return [Device(f"echo{i}", size, size) for i, size in enumerate(self._options.device_bytes)]

    def need(self, shape: Shape) -> MemoryNeed:
        """Return the memory that the options claim for *shape*."""
        tokens, on_devices = shape.slots * shape.ctx_size, shape.n_gpu_layers
        layer_bytes = max(0, self._options.layer_bytes)
        on_host = (self._options.layers - on_devices) * layer_bytes
        return MemoryNeed(
            weights=max(0, self._options.weight_bytes) + on_host,
            context=max(0, self._options.token_bytes) * tokens,
            draft=max(0, self._options.draft_bytes),
            devices=self._spread(on_devices, layer_bytes) if on_devices else {},
            embedding=max(0, self._options.embedding_bytes),
            measuring=max(0, self._options.probe_bytes),
        )

    def _spread(self, layers: int, layer_bytes: int) -> dict[str, int]:
        """Return the bytes of *layers* on each device, in the split's proportions."""
        if self._main >= 0:
            return {f"echo{self._main}": layers * layer_bytes}
        total = sum(self._split)
        ends = [round(layers * end / total) for end in accumulate(self._split)]
        return {
            f"echo{i}": (end - begin) * layer_bytes
            for i, (begin, end) in enumerate(pairwise((0, *ends)))
        }

    def close(self) -> None:
        """Free nothing."""
