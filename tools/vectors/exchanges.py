"""Exchanges with the model echo, from the hellos to the end; each function adds one."""

from __future__ import annotations

from array import array
from typing import Any

from inferd.backends.echo.model import EMBEDDING_SIZE, echo_vectors
from inferd.backends.errors import (
    EndOfSequence,
    InferdError,
    InvalidArgument,
    UnsupportedOperation,
)
from inferd.ipc import messages as w
from inferd.scheduler.messages import Embedded, pack_tokens
from inferd.sessions.answers.calls import call_id
from inferd.sessions.conversation.outputs import embedding_json

from .exchange import Exchange

__all__ = ("EXCHANGES",)


def metadata(prompt: int, output: int, **fields: Any) -> dict[str, Any]:
    """Return the metadata of a turn on the echo model, with plausible times."""
    return {
        "input_tokens": prompt,
        "output_tokens": output,
        "llama_build_number": 0,
        "llama_commit": "",
        "cached_tokens": 0,
        "queue_ms": 0.25,
        "ttft_ms": 0.5,
        "prompt_ms": 0.25,
        "predicted_ms": 1.5,
        "stop_reason": "eos",
        "stop_detail": "256",
        "shifts": 0,
        "shifted": False,
        "parks": 0,
        "forced_tokens": 0,
        "reasoning_tokens": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "tool_format": "none",
        "recomputed_tokens": 0,
        "recomputed_reason": "",
        "dropped_tokens": 0,
        "dropped_turns": 0,
        "seed": 7,
        "lora": {},
        "model": "echo",
        "fingerprint": "echo-1",
        "session_id": None,
        "durable": None,
        "not_applied": {},
        "adjusted": {},
        "ignored": [],
    } | fields


def tensor(data: bytes) -> w.Tensor:
    """Return bytes as a tensor."""
    return w.Tensor(data=data, dimensions=[len(data)])


def computed() -> dict[str, Any]:
    """A prompt that is computed at once: the shortest sequence of wasi-nn calls."""
    x = Exchange("compute")
    graph, context = x.open()
    on_context = w.ContextParams(context=context)
    x.call("set_input", w.SetInputParams(context=context, index=0, tensor=tensor(b"hi")), w.Empty())
    x.call("compute", w.ComputeParams(context=context), w.ComputeResult())
    x.call("get_output", w.GetOutputParams(context=context), w.OutputResult(data=b"hi"))
    x.call("finalize_execution_context", on_context, w.Empty())
    x.call("unload", w.UnloadParams(graph=graph), w.Empty())
    return x.done()


def streamed() -> dict[str, Any]:
    """A stream with credit for two events; the two tokens of é arrive as one piece."""
    x = Exchange("stream")
    _, context = x.open()
    number = x.request("stream", w.StreamParams(context=context, prompt="hé!", credit=2))
    pieces = ((104, b"h"), (195, b""), (169, "é".encode()), (33, b"!"))
    for offset, (token, text) in enumerate(pieces):
        x.event(number, w.TokensEvent(tokens=[token], text=text, offset=offset))
        x.credit(number, 1)
    x.reply(number, w.TurnResult(metadata=metadata(6, 5)))
    return x.done()


def single() -> dict[str, Any]:
    """A turn token by token, to its end."""
    x = Exchange("compute_single")
    _, context = x.open()
    on_context = w.ContextParams(context=context)
    one = w.ComputeSingleParams(context=context)
    x.call("set_input", w.SetInputParams(context=context, index=0, tensor=tensor(b"ab")), w.Empty())
    x.call("compute_single", one, w.ComputeSingleResult(piece=b"a"))
    x.call("get_output_single", w.GetOutputParams(context=context), w.OutputResult(data=b"a"))
    x.call("compute_single", one, w.ComputeSingleResult(piece=b"b"))
    end = EndOfSequence("the turn has ended: eos", data={"stop_reason": "eos"})
    x.refused("compute_single", one, end)
    x.call("get_output", w.GetOutputParams(context=context), w.OutputResult(data=b"ab"))
    x.call("fini_single", on_context, w.Empty())
    return x.done()


def named() -> dict[str, Any]:
    """`compute` with named tensors, each of which the echo model returns under its name."""
    x = Exchange("compute with named tensors")
    _, context = x.open()
    inputs = [("metadata", tensor(b'{"seed":7,"n-predict":8}')), ("prompt", tensor(b"hey"))]
    x.call(
        "compute",
        w.ComputeParams(context=context, inputs=inputs),
        w.ComputeResult(
            outputs=inputs,
            metadata=metadata(5, 4),
        ),
    )
    return x.done()


def natural() -> dict[str, Any]:
    """inferd's own calls on a session with an id."""
    x = Exchange("chat in a session with an id")
    graph, _ = x.open()
    context = x.handle()
    x.call(
        "init_execution_context_with_session_id",
        w.SessionParams(graph=graph, session_id="notes"),
        w.ContextResult(context=context),
    )
    x.call("reset", w.SystemParams(context=context, system="Be brief."), w.Empty())
    options = {"temp": 0, "stop": ["."]}
    x.call(
        "set_options",
        w.OptionsParams(context=context, options=options, priority="high"),
        w.Empty(),
    )
    x.call(
        "chat",
        w.StreamParams(context=context, prompt="yes."),
        w.TurnResult(
            text=b"yes",
            metadata=metadata(
                6, 4, stop_reason="stop", stop_detail=".", session_id="notes", durable=True
            ),
        ),
    )
    x.call("cancel", w.CancelParams(context=context), w.CancelResult(cancelled=False))
    x.call("park", w.ContextParams(context=context), w.ParkResult(parked=False))
    x.call(
        "end_reasoning",
        w.ContextParams(context=context),
        w.EndReasoningResult(ended=False, reason="no_turn"),
    )
    x.call("queue", w.Empty(), w.QueueResult(tasks=[]))
    x.call(
        "tokenize",
        w.TokenizeParams(graph=graph, text="hi", special=True),
        w.TokensResult(tokens=[258, 104, 105, 257]),
    )
    x.call(
        "detokenize", w.DetokenizeParams(graph=graph, tokens=[104, 105]), w.TextResult(text=b"hi")
    )
    x.call(
        "apply_template",
        w.TemplateParams(graph=graph, messages=[{"role": "user", "content": "hi"}]),
        w.TemplateResult(text=b"hi", tokens=4),
    )
    return x.done()


def branched() -> dict[str, Any]:
    """Branches of a session's state, a rewind, and the deletion of the session."""
    x = Exchange("branches")
    _, context = x.open()
    turn = w.StreamParams(context=context, prompt="hi", raw=True)
    x.call("chat", turn, w.TurnResult(text=b"hi", metadata=metadata(4, 3)))
    one, two = x.handle(), x.handle()
    x.call(
        "fork_session",
        w.ForkParams(context=context, n=2, session_ids=["a", "b"]),
        w.ForkResult(contexts=[one, two], tokens=6, cached_tokens=6),
    )
    x.call(
        "rewind",
        w.RewindParams(context=one, turns=1),
        w.RewindResult(),
    )
    x.call(
        "rewind",
        w.RewindParams(context=two, tokens=3),
        w.RewindResult(tokens=3, turns=1, cached_tokens=3),
    )
    x.call(
        "delete_session",
        w.DeleteSessionParams(session_id="b", undo_s=59.5),
        w.DeleteSessionResult(deleted=True),
    )
    x.call(
        "delete_session", w.DeleteSessionParams(session_id="b"), w.DeleteSessionResult(deleted=True)
    )
    x.call("list_deletions", w.ListDeletionsParams(clear=True), w.ListDeletionsResult(deletions=[]))
    x.call(
        "delete_session", w.DeleteSessionParams(context=one), w.DeleteSessionResult(deleted=True)
    )
    x.call(
        "delete_session",
        w.DeleteSessionParams(session_id="b"),
        w.DeleteSessionResult(deleted=False),
    )
    return x.done()


def frozen() -> dict[str, Any]:
    """A named state, a context that begins with it, and its deletion."""
    x = Exchange("a named state")
    graph, context = x.open()
    turn = w.StreamParams(context=context, prompt="hi", raw=True)
    x.call("chat", turn, w.TurnResult(text=b"hi", metadata=metadata(4, 3)))
    saved = w.SaveStateResult(tokens=6)
    x.call("save_state", w.SaveStateParams(context=context, name="greeting"), saved)
    x.handle()  # of the branch that was saved
    begun = w.OpenParams(graph=graph, from_state="greeting")
    x.call("init_execution_context", begun, w.ContextResult(context=x.handle()))
    one = w.DeleteStateParams(name="greeting")
    x.call("delete_state", one, w.DeleteStateResult(deleted=True))
    return x.done()


def called() -> dict[str, Any]:
    """A tool call that an answer must have."""
    x = Exchange("a tool call")
    _, context = x.open()
    now = {"type": "function", "function": {"name": "now"}}
    options = {"tools": [now], "tool-choice": "required", "seed": 7}
    answer = '{"name": "now", "arguments": {}}'
    tokens = [258, *answer.encode(), 257]
    one = call_id(b"7 " + pack_tokens(tokens), 0)
    details = metadata(
        len(tokens),
        len(answer) + 1,
        tool_format="json",
        adjusted={
            "tools": "the model echo has no chat template",
            "tool-choice": "the model echo repeats its prompt",
        },
    )
    x.call(
        "chat",
        w.StreamParams(context=context, prompt=answer, options=options),
        w.TurnResult(
            tool_calls=[w.ToolCallPart(index=0, id=one, name="now", arguments="{}")],
            metadata=details,
        ),
    )
    return x.done()


def resumed() -> dict[str, Any]:
    """A turn that is interrupted, attached again, and resumed after the text that was read."""
    x = Exchange("a turn that is resumed")
    graph, _ = x.open()
    context, again = x.handle(), x.handle()
    named = w.SessionParams(graph=graph, session_id="notes")
    call = "init_execution_context_with_session_id"
    x.call(call, named, w.ContextResult(context=context))
    prompt = w.SetInputParams(context=context, index=0, tensor=tensor(b"abcd"))
    x.call("set_input", prompt, w.Empty())
    one = w.ComputeSingleParams(context=context)
    for piece in (b"a", b"b"):
        x.call("compute_single", one, w.ComputeSingleResult(piece=piece))
    kept = w.FinalizeParams(context=context, keep=True)
    x.call("finalize_execution_context", kept, w.Empty())
    x.call(call, named, w.ContextResult(context=again, attached=True))
    number = x.request("resume", w.ResumeParams(context=again, tokens=[97], text=b"a"))
    for offset, text in enumerate((b"b", b"c", b"d"), 1):
        x.event(number, w.TokensEvent(tokens=list(text), text=text, offset=offset))
    end = metadata(6, 5, session_id="notes", durable=True)
    x.reply(number, w.TurnResult(metadata=end), ["/2/metadata/cached_tokens"])
    return x.done()


def watched() -> dict[str, Any]:
    """Four turns without a reader have the slots; a fifth waits and gets queue events."""
    x = Exchange("a place in the queue")
    graph, first = x.open()
    contexts = [first]
    for _ in range(4):
        contexts.append(x.handle())
        x.call(
            "init_execution_context",
            w.GraphParams(graph=graph),
            w.ContextResult(context=contexts[-1]),
        )
    for context in contexts[:4]:
        prompt = w.SetInputParams(context=context, index=0, tensor=tensor(b"ab"))
        x.call("set_input", prompt, w.Empty())
        one = w.ComputeSingleParams(context=context)
        x.call("compute_single", one, w.ComputeSingleResult(piece=b"a"))
    turn = w.StreamParams(context=contexts[4], prompt="hi", queue_events=True)
    number = x.request("stream", turn)
    x.event(number, w.QueueEvent(position=1, waiting=1, starts_in_s=6.4), ["/2/starts_in_s"])
    for offset, text in enumerate((b"h", b"i")):
        x.event(number, w.TokensEvent(tokens=list(text), text=text, offset=offset))
    x.reply(number, w.TurnResult(metadata=metadata(4, 3)), ["/2/metadata/cached_tokens"])
    return x.done()


def passed() -> dict[str, Any]:
    """A prompt in a descriptor: `fd` 0 is the first one that arrived with the frame."""
    x = Exchange("a prompt in a descriptor")
    _, context = x.open()
    params = w.SetInputParams(context=context, index=0, tensor=w.Tensor(dimensions=[5], fd=0))
    x.call("set_input", params, w.Empty(), descriptors=[b"hello".hex()])
    x.call("compute", w.ComputeParams(context=context), w.ComputeResult())
    x.call("get_output", w.GetOutputParams(context=context), w.OutputResult(data=b"hello"))
    return x.done()


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
"""An image of one pixel."""


def pictured() -> dict[str, Any]:
    """Images in messages: one is a text, the other one is for a model that reads images."""
    x = Exchange("images that are refused")
    _, context = x.open()
    place = {"item": 0, "param": "messages.0.content.1"}
    text = {"type": "text", "text": "What is this?"}
    refusals: list[tuple[dict[str, Any], InferdError]] = [
        (
            {"data": b"a text", "alt": "a dot"},
            InvalidArgument("this is not an image: it is a text", data={"media_type": ""} | place),
        ),
        (
            {"data": PNG, "detail": "low"},
            UnsupportedOperation(
                "echo reads no images", data={"model": "echo", "kind": "image"} | place
            ),
        ),
    ]
    for fields, error in refusals:
        message = {"role": "user", "content": [text, {"type": "image"} | fields]}
        x.refused("chat", w.StreamParams(context=context, messages=[message]), error)
    return x.done()


def embedded() -> dict[str, Any]:
    """Embeddings of texts, and a context that computes one."""
    x = Exchange("embeddings")
    graph, context = x.open()
    texts = w.EmbedParams(graph=graph, texts=["hi", "you"], pooling="last", normalize=-1)
    vectors = [array("f", echo_vectors([258, *text.encode(), 257])[-1]) for text in texts.texts]
    x.call(
        "embed",
        texts,
        w.EmbedResult(
            embeddings=[vector.tobytes() for vector in vectors],
            size=EMBEDDING_SIZE,
            pooling="last",
            tokens=[4, 5],
            model="echo",
            fingerprint="echo-1",
        ),
    )
    switch = b'{"embedding":true,"pooling":"last","embd-normalize":-1}'
    x.call(
        "set_input", w.SetInputParams(context=context, index=1, tensor=tensor(switch)), w.Empty()
    )
    x.call("set_input", w.SetInputParams(context=context, index=0, tensor=tensor(b"hi")), w.Empty())
    x.call("compute", w.ComputeParams(context=context), w.ComputeResult())
    embedded = Embedded(0, EMBEDDING_SIZE, "last", vectors[0].tobytes())
    output = w.OutputResult(data=embedding_json(embedded))
    x.call("get_output", w.GetOutputParams(context=context), output)
    return x.done()


def refused_documents() -> dict[str, Any]:
    """Documents for a model that ranks none."""
    x = Exchange("documents that are not ranked")
    graph, _ = x.open()
    params = w.RerankParams(graph=graph, query="q", documents=["a", "b"], top_n=1)
    x.refused("rerank", params, UnsupportedOperation("the model ranks no documents"))
    return x.done()


EXCHANGES = (
    computed, streamed, single, named, natural, called, embedded, branched, frozen, resumed,
    watched, passed, pictured, refused_documents,
)  # fmt: skip
