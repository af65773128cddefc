"""llguidance's C interface (llguidance.h), which its Python extension exports, too.

The calls that can take long release the GIL. Python's `LLTokenizer` would hold it while it is made,
and all turns of a worker would wait meanwhile.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llguidance import LLParserLimits, _lib
from numpy.typing import NDArray

from ..errors import BackendError
from .limits import MATCHING_LIMITS

__all__ = ("Matcher", "MatchingTokenizer")

_ERROR_BYTES = 300
FORCED_MAX = 128
"""Forced tokens of one call; the next call returns those behind them."""
_CHOPPED_MAX = 4
"""Last tokens of a forced text that llguidance leaves out, as later text could change them."""
TOKENS_MIN = FORCED_MAX + 2 * _CHOPPED_MAX
"""If only the first tokens of a long text are returned, there are at least this many."""
_SLICES = (rb'[^"\\\x00-\x1F\x7F]{1,10}', rb'[^"\\\x00-\x1F\x7F]{1,30}')
"""Texts of a JSON string. Where the string may contain any of them, llguidance allows their tokens
at once, so that a mask takes 0.2 to 1 ms, not 10 ms (measured with 262k tokens). The other two of
llguidance's default slices save no time, and would take 0.25 of 1.25 s, and 30 of 85 MB.
"""

_Tokenize = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
)


class _TokenizerInit(ctypes.Structure):
    """`LlgTokenizerInitV2`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p),
        ("token_bytes", ctypes.c_char_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", _Tokenize),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("tok_eos_extra", ctypes.c_void_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


class _Limits(ctypes.Structure):
    """`LlgParserLimits`."""

    _fields_ = (
        ("max_items_in_row", ctypes.c_size_t),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", ctypes.c_size_t),
        ("max_lexer_states", ctypes.c_size_t),
        ("max_grammar_size", ctypes.c_size_t),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
    )


class _MatcherInit(ctypes.Structure):
    """`LlgConstraintInit`."""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("limits", _Limits),
    )


_with_gil, _without_gil = ctypes.PyDLL(_lib.__file__), ctypes.CDLL(_lib.__file__)


def _function(library: Any, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name, None)
    if function is None:
        raise ImportError(f"this llguidance does not export {name}")
    function.restype, function.argtypes = result, arguments
    return function


_POINTER = ctypes.c_void_p
_new_tokenizer = _function(
    _without_gil,
    "llg_new_tokenizer_v2",
    *(_POINTER, ctypes.POINTER(_TokenizerInit), ctypes.c_char_p, ctypes.c_size_t),
)
_free_tokenizer = _function(_with_gil, "llg_free_tokenizer", None, _POINTER)
_new_matcher = _function(
    _without_gil,
    "llg_new_matcher",
    *(_POINTER, ctypes.POINTER(_MatcherInit), ctypes.c_char_p, ctypes.c_char_p),
)
_clone_matcher = _function(_with_gil, "llg_clone_matcher", _POINTER, _POINTER)
_free_matcher = _function(_with_gil, "llg_free_matcher", None, _POINTER)
_compute_mask = _function(
    _without_gil,
    "llg_matcher_compute_mask_into",
    *(ctypes.c_int32, _POINTER, _POINTER, ctypes.c_size_t),
)
_validate = _function(
    _with_gil,
    "llg_matcher_validate_tokens",
    *(ctypes.c_int32, _POINTER, ctypes.POINTER(ctypes.c_uint32), ctypes.c_size_t),
)
_consume = _function(
    _with_gil, "llg_matcher_consume_token", ctypes.c_int32, _POINTER, ctypes.c_uint32
)
_compute_forced = _function(
    _without_gil,
    "llg_matcher_compute_ff_tokens",
    *(ctypes.c_int32, _POINTER, _POINTER, ctypes.c_size_t),
)
_is_accepting = _function(_with_gil, "llg_matcher_is_accepting", ctypes.c_bool, _POINTER)
_is_stopped = _function(_with_gil, "llg_matcher_is_stopped", ctypes.c_bool, _POINTER)
_is_error = _function(_with_gil, "llg_matcher_is_error", ctypes.c_bool, _POINTER)
_get_error = _function(_with_gil, "llg_matcher_get_error", ctypes.c_char_p, _POINTER)


class MatchingTokenizer:
    """llguidance's form of a vocabulary. Read-only; any thread may use it.

    *lengths* and *texts* are those of the tokens; a text after the byte 0xFF is a name, which no
    text contains. *ends* are the tokens that end an answer. *tokenize* returns the tokens of a
    text in UTF-8, all or at least the first `TOKENS_MIN`. It is called where a grammar forces a
    text, in any thread, and must not raise.
    """

    def __init__(
        self,
        lengths: NDArray[np.uint32],
        texts: bytes,
        ends: Sequence[int],
        tokenize: Callable[[bytes], Sequence[int]],
    ):
        self.size, self.ends = len(lengths), frozenset(ends)
        self._callback = _Tokenize(_tokenize_with(tokenize))  # ctypes keeps no reference
        extra = np.array(ends[1:], dtype=np.uint32)
        slices = (ctypes.c_char_p * (len(_SLICES) + 1))(*_SLICES, None)
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=self.size,
            tok_eos=ends[0],
            token_lens=lengths.ctypes.data,
            token_bytes=texts,
            tokenize_assumes_string=True,
            tokenize_fn=self._callback,
            slices=ctypes.addressof(slices),
            tok_eos_extra=extra.ctypes.data,
            tok_eos_extra_count=len(extra),
        )
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.pointer = _new_tokenizer(ctypes.byref(init), error, _ERROR_BYTES)
        if not self.pointer:
            cause = error.value.decode("utf-8", "replace")
            raise BackendError(f"llguidance cannot use the vocabulary: {cause}")
        weakref.finalize(self, _free_tokenizer, self.pointer)


def _tokenize_with(tokenize: Callable[[bytes], Sequence[int]]) -> Callable[..., int]:
    """Return *tokenize* as a function for C."""

    def call(_data: int, text: int, size: int, target: int, target_size: int) -> int:
        tokens = tokenize(ctypes.string_at(text, size))
        count = min(len(tokens), target_size)
        if count:
            (ctypes.c_uint32 * count).from_address(target)[:] = list(tokens[:count])
        return len(tokens)

    return call


class Matcher:
    """A grammar's state after some tokens; used by one thread at a time.

    No method raises an error. After one, `is_error` returns True and the other results are wrong.
    """

    def __init__(self, tokenizer: MatchingTokenizer, pointer: int):
        self._tokenizer, self._pointer = tokenizer, pointer
        self._one = ctypes.c_uint32()
        weakref.finalize(self, _free_matcher, pointer)

    @classmethod
    def compile(
        cls, tokenizer: MatchingTokenizer, grammar: str, limits: LLParserLimits = MATCHING_LIMITS
    ) -> Matcher:
        """Return a grammar's state at its beginning. *grammar* is in llguidance's form."""
        values = _Limits(*(getattr(limits, name) for name, _ in _Limits._fields_))
        init = _MatcherInit(tokenizer=tokenizer.pointer, limits=values)
        kind = b"llguidance" if grammar.startswith("{") else b"lark"
        return cls(tokenizer, _new_matcher(ctypes.byref(init), kind, grammar.encode()))

    def deep_copy(self) -> Matcher:
        """Return an equal state, which changes independently."""
        return Matcher(self._tokenizer, _clone_matcher(self._pointer))

    def is_error(self) -> bool:
        """Return whether an error has occurred."""
        return bool(_is_error(self._pointer))

    def get_error(self) -> str:
        """Return the error in one line; empty if there is none."""
        error = (_get_error(self._pointer) or b"").decode("utf-8", "replace")
        return error.partition("\n")[0]

    def is_accepting(self) -> bool:
        """Return whether the text may end here."""
        return bool(_is_accepting(self._pointer))

    def is_stopped(self) -> bool:
        """Return whether nothing can follow."""
        return bool(_is_stopped(self._pointer))

    def allows(self, token: int) -> bool:
        """Return whether *token* may come next."""
        self._one.value = token
        return bool(_validate(self._pointer, ctypes.byref(self._one), 1) == 1)

    def consume_token(self, token: int) -> bool:
        """Continue after *token*; return whether that succeeded. Where nothing can follow, the
        tokens in `ends` succeed too.
        """
        if token in self._tokenizer.ends and self.is_stopped():
            return not self.is_error()
        return bool(_consume(self._pointer, token) == 0)

    def compute_bitmask(self) -> NDArray[np.uint8]:
        """Return a bit for each token, set if it may come next; the lowest bit of a byte first."""
        mask = np.zeros(-(-self._tokenizer.size // 32) * 4, dtype=np.uint8)
        _compute_mask(self._pointer, mask.ctypes.data, len(mask))
        return mask

    def compute_ff_tokens(self) -> list[int]:
        """Return the next tokens, as far as the grammar forces them; at most `FORCED_MAX`."""
        found = (ctypes.c_uint32 * FORCED_MAX)()
        count = _compute_forced(self._pointer, ctypes.addressof(found), FORCED_MAX)
        return found[: max(0, count)]
