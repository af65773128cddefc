"""Calls that need a model but no session: text to tokens and back, messages to a prompt."""

from __future__ import annotations

from ...backends import Rendering
from ...backends.errors import InvalidArgument
from ...backends.params import read_options
from ...ipc import messages as w
from ...ipc.server.server_connection import Request
from ..core import CallTable, Daemon, Graph
from .chat_messages import checked_messages


async def tokenize(daemon: Daemon, request: Request) -> w.TokensResult:
    """Tokenize text."""
    p = request.params
    lease = daemon.graph(request.connection, p.graph).lease
    text = p.text.encode()
    tokens = await lease.ask(lambda it: it.tokenize(text, special=p.special, bos=p.bos))
    return w.TokensResult(tokens=tokens)


async def detokenize(daemon: Daemon, request: Request) -> w.TextResult:
    """Detokenize token ids."""
    p = request.params
    lease = daemon.graph(request.connection, p.graph).lease
    size = (await lease.ready()).info.vocab_size
    bad = next((t for t in p.tokens if not 0 <= t < size), None)
    if bad is not None:
        raise InvalidArgument(f"token {bad} is not in the vocabulary of {size}")
    return w.TextResult(text=await lease.ask(lambda it: it.detokenize(p.tokens)))


async def apply_template(daemon: Daemon, request: Request) -> w.TemplateResult:
    """Render messages by the chat template."""
    p = request.params
    graph = daemon.graph(request.connection, p.graph)
    messages, rendering = checked_messages(p.messages), _rendering(graph, p)
    text, tokens, _ = await graph.lease.ask(
        lambda it: it.chat_prompt(messages, rendering=rendering)
    )
    return w.TemplateResult(text=text.encode(), tokens=len(tokens))


def _rendering(graph: Graph, p: w.TemplateParams) -> Rendering:
    """Return the template's inputs: the call's, else the graph's."""
    given = read_options({"tools": p.tools, "chat-template-kwargs": p.arguments}).values
    tools, arguments = given["tools"], given["chat-template-kwargs"]
    return Rendering(
        tools=tools or graph.options.get("tools", []),
        arguments=arguments or graph.options.get("chat-template-kwargs", {}),
        add_generation_prompt=p.add_generation_prompt,
    )


CALLS: CallTable = {
    "tokenize": tokenize,
    "detokenize": detokenize,
    "apply_template": apply_template,
}
