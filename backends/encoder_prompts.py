"""Prompts of encoder-decoders such as T5, and the split of their tokens between the two parts.

The encoder reads the whole prompt at once; the decoder begins with a start token and generates the
answer. In a history the prompt's tokens are followed by the start token, then by those of the
answer. So the tokens up to the first start token are computed in one step, and all later ones are
the decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence

ENCODER_DECODERS = ("t5",)
"""The architectures that llama.cpp runs in this way."""


def encoded_size(tokens: Sequence[int], start: int) -> int:
    """Return how many of the first *tokens* are the encoder's, with the *start* token behind them;
    0 if no start token follows a token for the encoder.
    """
    try:
        return tokens.index(start, 1) + 1
    except ValueError:
        return 0


def as_prompt(tokens: list[int], start: int) -> list[int]:
    """Return *tokens* as a prompt, which has the *start* token."""
    return tokens if encoded_size(tokens, start) else [*tokens, start]


def as_text_prompt(tokens: list[int], start: int) -> list[int]:
    """Return the *tokens* of a text as a prompt, which the encoder reads whole: the name of the
    *start* token in the text does not begin the answer. A BOS token may be the same token.
    """
    return [*tokens[:1], *(token for token in tokens[1:] if token != start), start]


def ctx_size_trained(architecture: str | None, size: int) -> int:
    """Return the tokens of prompt and answer for which a model was trained, whose file states
    *size*. Encoder and decoder have as many each.
    """
    return 2 * size if architecture in ENCODER_DECODERS else size
