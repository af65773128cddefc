"""Prompts to fill in the middle: the layout and the budgets of llama-server's `/infill`
(`format_prompt_infill` in `server-common.cpp`). All functions are pure.

The start of a long prefix is at a multiple of a step, where llama-server's moves with each token:
while somebody types, the prompts of an editor's buffer begin with the same tokens, whose KV state
is reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...backends.base import ModelInfo, SpecialToken
from ...backends.errors import UnsupportedOperation

FILE_TOKENS_MAX = 2048
"""The tokens of prefix and suffix, with the marks around them: llama-server's default `n_batch`."""
_ANSWER_TOKENS = 256
"""The tokens that are left for an answer without a bound."""
_MARKS = 2
"""The tokens around prefix and suffix, less the two in the budget of the suffix."""
_STEPS = 6
"""The steps of a prefix's budget. Its start moves by one of them."""
_PROJECT, _FILE = "myproject\n", "filename\n"
"""llama-server's fixed names, which never make two prompts differ."""
_SNIPPET = "\n\n--- snippet ---\n\n"
"""The text before an extra part, for vocabularies without a token that separates files."""
_REQUIRED = {"fim-pre": "prefix", "fim-suf": "suffix", "fim-mid": "middle"}


class InfillText(NamedTuple):
    """A place in a file: the *prefix* before it, and the *suffix* behind it. The answer continues
    the prefix and *typed*, the text at the place that is not in the file. *extra* are parts of
    other files: names and texts.
    """

    prefix: str
    suffix: str
    typed: str = ""
    extra: Sequence[tuple[str, str]] = ()
    suffix_first: bool = False


class InfillBudget(NamedTuple):
    """The most tokens of the end of the prefix, of the start of the suffix, with two marks and the
    typed text, and of the end of the extra parts.
    """

    prefix: int
    suffix: int
    extra: int

    @classmethod
    def of_context(cls, ctx_size: int, n_predict: int) -> InfillBudget:
        """Return the budget in a context of *ctx_size* tokens, for answers of *n_predict* tokens; a
        negative number sets no bound.
        """
        wanted = _ANSWER_TOKENS if n_predict < 0 else n_predict
        answer = max(1, min(wanted, ctx_size // 2))
        file = max(0, min(FILE_TOKENS_MAX, ctx_size - answer - _MARKS) // 4 * 4)
        extra = ctx_size - file - answer - max(answer, _MARKS)
        return cls(3 * (file // 4), file // 4, max(0, extra))


def check_infill(info: ModelInfo, model: str) -> Mapping[str, SpecialToken]:
    """Return the special tokens of a model that fills in the middle.

    :raises UnsupportedOperation: its vocabulary lacks one of the tokens for that.
    """
    missing = [word for name, word in _REQUIRED.items() if name not in info.special_tokens]
    if missing:
        tokens = "token" if len(missing) == 1 else "tokens"
        raise UnsupportedOperation(
            f"the model {model!r} does not fill in text between two others: its vocabulary has no"
            f" {tokens} for {', '.join(missing)}",
            hint="use a model for code that was trained to fill in the middle (FIM)",
            data={"missing": missing},
        )
    return info.special_tokens


def texts_of(text: InfillText, budget: InfillBudget, info: ModelInfo) -> list[str]:
    """Return the texts to tokenize, each by itself: prefix, suffix and typed text, the name of the
    project, the name of the file, and for each extra part its name and its text. Of a text with
    more characters than its budget can have, only the characters that may be used are left.
    """
    size, names = info.token_bytes_max, info.special_tokens
    extra: list[str] = []
    left = budget.extra * size
    for name, part in reversed(text.extra):
        if left <= 0:
            break
        extra = [f"{name or 'tmp'}\n" if "fim-sep" in names else _SNIPPET, part[-left:], *extra]
        left -= len(part)
    start = _start_of(len(text.prefix), 2 * budget.prefix * size)
    head = [text.prefix[start:], text.suffix[: budget.suffix * size], text.typed]
    return [*head, _PROJECT, _FILE, *extra]


def infill_prompt(
    parts: Sequence[list[int]],
    names: Mapping[str, SpecialToken],
    budget: InfillBudget,
    *,
    begin: Sequence[int],
    suffix_first: bool,
) -> list[int]:
    """Return the prompt of the tokens of `texts_of`. *begin* are those that begin a prompt."""
    prefix, suffix, typed, project, file, *extra = parts
    mark = {name: [token.id] for name, token in names.items()}
    repository = mark.get("fim-rep", [])
    before = [*repository, *(project if repository else ())]
    separator = mark.get("fim-sep", [])
    for name, part in zip(extra[::2], extra[1::2], strict=True):
        before += [*separator, *name, *part]
    before += [*separator, *(file if separator else ())]
    before = before[max(0, len(before) - budget.extra) :]
    room = budget.suffix - 2 - len(typed)
    start = _start_of(len(prefix), max(0, budget.prefix + min(0, room)))
    typed = typed[max(0, -budget.prefix - room) :]
    suffix = suffix[: max(0, room)]
    head = [*mark["fim-pre"], *prefix[start:], *typed]
    tail = [*mark["fim-suf"], *suffix]
    first, second = (tail, head) if suffix_first else (head, tail)
    return [*before, *begin, *first, *second, *mark["fim-mid"]]


def _start_of(size: int, budget: int) -> int:
    """Return the first token, or character, that is used of a prefix: the first multiple of a step
    from which on the rest is within the budget.
    """
    step = max(1, budget // _STEPS)
    return -(-max(0, size - budget) // step) * step
