"""The prompt of a reranking model, from the template named `rerank` of its file or else the tokens
of its vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llama_cpp import llama_cpp as lib

from ...embedder import DOCUMENT, QUERY, RankPart
from .vocab import NAME_TYPES, Vocab, raw_function

TEMPLATE = b"rerank"
_FIELD = re.compile(b"(%s|%s)" % (re.escape(QUERY), re.escape(DOCUMENT)))


def rank_parts(model: Any) -> tuple[RankPart, ...]:
    """Return the parts of the prompt. A template without both fields is not used."""
    pointer = lib.llama_model_get_vocab(model)
    template: bytes = lib.llama_model_chat_template(model, TEMPLATE) or b""
    if QUERY in template and DOCUMENT in template:
        return template_parts(template, _control_tokens(Vocab(pointer), template))
    eos = int(lib.llama_vocab_eos(pointer))
    sep = int(lib.llama_vocab_sep(pointer))
    return separated_parts(
        bos=[int(lib.llama_vocab_bos(pointer))] if lib.llama_vocab_get_add_bos(pointer) else [],
        eos=[sep if eos < 0 else eos] if lib.llama_vocab_get_add_eos(pointer) else [],
        sep=[sep] if lib.llama_vocab_get_add_sep(pointer) else [],
    )


def separated_parts(*, bos: list[int], eos: list[int], sep: list[int]) -> tuple[RankPart, ...]:
    """Return the prompt BOS query EOS SEP document EOS, as in llama-server's
    `format_prompt_rerank`. Tokens that the vocabulary lacks, -1, are left out.
    """
    query, document = RankPart(texts=(QUERY,)), RankPart(texts=(DOCUMENT,))
    parts = _tokens(bos), query, _tokens([*eos, *sep]), document, _tokens(eos)
    return tuple(part for part in parts if part.tokens or part.texts)


def _tokens(ids: list[int]) -> RankPart:
    return RankPart(tokens=tuple(i for i in ids if i >= 0))


def template_parts(template: bytes, control: Mapping[bytes, int]) -> tuple[RankPart, ...]:
    """Return the parts of a *template*, which has *control* tokens by their names. The text between
    two of them is tokenized as one, as the model was trained.
    """
    longest_first = sorted(control, key=len, reverse=True)
    names = re.compile(b"(%s)" % b"|".join(map(re.escape, longest_first)))
    pieces = names.split(template) if control else [template]
    parts = list[RankPart]()
    for piece in filter(None, pieces):
        if piece in control:
            parts.append(RankPart(tokens=(control[piece],)))
        else:
            parts.append(RankPart(texts=tuple(filter(None, _FIELD.split(piece)))))
    return tuple(parts)


def _control_tokens(vocab: Vocab, template: bytes) -> dict[bytes, int]:
    """Return the control tokens whose names are in *template*."""
    name_of = raw_function("llama_vocab_get_text", *NAME_TYPES)
    names = ((name_of(vocab.address, token), token) for token in (*vocab.special(), *vocab.eog()))
    return {name: t for name, t in names if name and name in template and vocab.is_control(t)}
