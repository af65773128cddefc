"""`/tokenize`, `/detokenize` and `/apply-template`."""

from __future__ import annotations

import time
from typing import Any

from ....backends.errors import InferdError
from ..exchange import Exchange, chosen_model, render_prompt
from ..openai.chat import turn_of
from .fields import APPLY_TEMPLATE, DETOKENIZE, TOKENIZE


async def answer_tokenize(exchange: Exchange) -> None:
    """Answer with the tokens of a text; with `with_pieces` also with the text of each."""
    request, _ = exchange.read_fields(TOKENIZE)
    parts = [request.content] if isinstance(request.content, str) else request.content
    turns, deadline = exchange.turns, time.monotonic() + exchange.limits.turn_s_max
    tokens: list[int] = []
    pieces: list[bytes] = []
    model = await chosen_model(exchange, request.model)
    try:
        async with turns.lease_graph(exchange.caller, model) as (client, graph):
            bos = request.add_special
            for part in parts:
                if isinstance(part, int):
                    tokens.append(part)
                elif part:
                    tokens += await client.tokenize(
                        graph,
                        part,
                        special=request.parse_special,
                        bos=bos,
                        timeout=turns.remaining_s(deadline),
                    )
                bos = False
            if request.with_pieces and tokens:
                pieces = await client.token_pieces(
                    graph, tokens, timeout=turns.remaining_s(deadline)
                )
    except InferdError as exc:
        raise TOKENIZE.name_field(exc) from None
    shown = [{"id": t, "piece": _shown(p)} for t, p in zip(tokens, pieces, strict=False)]
    await exchange.send_json({"tokens": shown if request.with_pieces else tokens})


def _shown(piece: bytes) -> Any:
    """Return the text of a token, or its bytes as numbers if they are a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def answer_detokenize(exchange: Exchange) -> None:
    """Answer with the text of token ids."""
    request, _ = exchange.read_fields(DETOKENIZE)
    content = ""
    if request.tokens:
        model = await chosen_model(exchange, request.model)
        try:
            [content] = await exchange.turns.detokenize(exchange.caller, model, [request.tokens])
        except InferdError as exc:
            exc.data.setdefault("param", "tokens")
            raise DETOKENIZE.name_field(exc) from None
    await exchange.send_json({"content": content})


async def answer_apply_template(exchange: Exchange) -> None:
    """Answer with the prompt of a chat, as the model's template writes it."""
    request, options = exchange.read_fields(APPLY_TEMPLATE)
    request.model = await chosen_model(exchange, request.model)
    try:
        turn = turn_of(request, options, exchange.caller, shows_prompt=True)
        rendered = await render_prompt(
            exchange, turn, add_generation_prompt=request.add_generation_prompt
        )
    except InferdError as exc:
        raise APPLY_TEMPLATE.name_field(exc) from None
    await exchange.send_json({"prompt": str(rendered)})
