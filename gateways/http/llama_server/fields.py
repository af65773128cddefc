"""The fields of the requests of llama-server's own paths."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..fields import FieldTable, honoured
from ..openai.chat_fields import CHAT, ChatRequest

_PARTS_MAX = 1000
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
MODEL = honoured("model", "may be absent if only one model is offered, or only one is loaded")


class TokenizeRequest(Struct, kw_only=True):
    """A text to tokenize, or a list of texts and token ids."""

    model: str = ""
    content: str | Annotated[list[str | TokenId], Meta(max_length=_PARTS_MAX)] = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Struct, kw_only=True):
    """Token ids to detokenize."""

    model: str = ""
    tokens: list[TokenId] = []


class TemplateRequest(ChatRequest, kw_only=True):
    """A chat whose prompt is requested."""

    model: str = ""


TOKENIZE = FieldTable(
    "/tokenize",
    [
        MODEL,
        honoured("content", f"a text, or up to {_PARTS_MAX} texts and token ids"),
        honoured("add_special", "the first text gets the tokens that begin a prompt"),
        honoured("parse_special", "true if absent: names of special tokens become these tokens"),
        honoured("with_pieces", "the text of each token, or its bytes if these are not UTF-8"),
    ],
    kind=TokenizeRequest,
)
DETOKENIZE = FieldTable("/detokenize", [MODEL, honoured("tokens")], kind=DetokenizeRequest)
APPLY_TEMPLATE = FieldTable(
    "/apply-template",
    [
        *(field for field in CHAT.fields if field.name not in ("model", "add_generation_prompt")),
        MODEL,
        honoured("add_generation_prompt", "false: the prompt ends with the last message"),
    ],
    kind=TemplateRequest,
    parameters=True,
    others=CHAT.others,
    media=CHAT.media,
)
