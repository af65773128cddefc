"""Write docs/protocol-vectors.json: frames in hex beside what they mean, for clients to test with.

Deterministic: the same sources give the same file. `tests/ipc/test_vectors.py` plays it against the
daemon and against our client.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from inferd.backends.echo_embedding import EMBEDDING_SIZE, echo_rows
from inferd.backends.errors import (
    Busy,
    EndOfSequence,
    InferdError,
    PermissionDenied,
    QuotaExceeded,
)
from inferd.ipc import messages as w
from inferd.ipc.frames import FRAME_BYTES_MAX, NESTING_MAX, pack
from inferd.scheduler.messages import Embedded
from inferd.sessions.embedding import embedding_json

PATH = Path(__file__).resolve().parent.parent / "docs" / "protocol-vectors.json"
INSTANCE = 1
SOFTWARE = "vectors"
ABOUT = [
    "Frames of inferd's protocol in hex, length included. `means` is the decoded array, in which",
    '{"$bin": HEX} stands for msgpack bin. docs/protocol.md explains the fields.',
    "exchanges: what is said with the model echo after a daemon's first start (instance 1), each",
    "exchange with a daemon of its own. `varies` has JSON pointers to values that differ from run",
    "to run and to texts that may be reworded. `descriptors` has what the memfds passed beside a",
    "frame contain.",
    "malformed: `frames` are sent by a client, after its hello if `hello` is true. The outcome is",
    "the name of an error reply or of a goodbye, or a reply.",
    "malformed_daemon: `frames` are sent by a daemon in answer to request 1 (`queue`), or, where",
    "`hello` is false, in place of its hello. The outcome is the error that a client raises, or a",
    "reply.",
]
TIMES = ["queue_ms", "ttft_ms", "prompt_ms", "predicted_ms"]
STATS = {"seed", "llama_build_number", "llama_commit", *TIMES}


def metadata(prompt: int, output: int, **fields: Any) -> dict[str, Any]:
    """Return the metadata of a turn on the echo model, with times as they could be."""
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
        "recomputed_tokens": 0,
        "recomputed_why": "",
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


def plain(value: Any) -> Any:
    """Return *value* as JSON has it."""
    if isinstance(value, bytes):
        return {"$bin": value.hex()}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


class Exchange:
    """Builds one exchange: hellos, then requests and what they are answered."""

    def __init__(self, name: str):
        self.name = name
        self.frames: list[dict[str, Any]] = []
        self._number = self._handles = 0
        self._daemon([0, daemon_hello()], ["/1/software", "/1/llama_commit"])
        self._client([0, w.ClientHello(protocol=w.PROTOCOL_VERSION, software=SOFTWARE)])

    def _add(self, side: str, message: Any, **more: Any) -> None:
        frame = pack(message)
        means = plain(msgspec.msgpack.decode(frame[4:]))
        self.frames.append({"from": side, "hex": frame.hex(), "means": means, **more})

    def _client(self, message: Any, **more: Any) -> None:
        self._add("client", message, **more)

    def _daemon(self, message: Any, varies: list[str] | None = None) -> None:
        self._add("daemon", message, **({"varies": varies} if varies else {}))

    def handle(self) -> int:
        """Return the handle that the daemon gives next."""
        self._handles += 1
        return INSTANCE << 32 | self._handles

    def request(self, call: str, params: Any, **more: Any) -> int:
        """Send a request and return its id."""
        self._number += 1
        self._client([1, self._number, call, params], **more)
        return self._number

    def call(self, call: str, params: Any, result: Any, **more: Any) -> None:
        """Send a request that is answered at once with *result*."""
        number = self.request(call, params, **more)
        answer = msgspec.to_builtins(result, builtin_types=(bytes,))
        varies = [f"/2/metadata/{key}" for key in answer.get("metadata", ()) if key in STATS]
        self._daemon([2, number, result], varies)

    def refused(self, call: str, params: Any, error: InferdError) -> None:
        """Send a request that is answered with *error*."""
        number = self.request(call, params)
        self._daemon([3, number, error.to_wire()], ["/2/message", "/2/hint"])

    def event(self, number: int, event: Any, varies: list[str] | None = None) -> None:
        """Let the daemon tell an event."""
        self._daemon([4, number, event], varies)

    def credit(self, number: int, events: int) -> None:
        """Let the client take more events."""
        self._client([5, number, events])

    def reply(self, number: int, result: w.TurnResult, more: Sequence[str] = ()) -> None:
        """Let the daemon answer a request that told events; *more* of it varies."""
        varies = [*more]
        varies += [f"/2/metadata/{key}" for key in result.metadata if key in STATS]
        self._daemon([2, number, result], varies)

    def open(self) -> tuple[int, int]:
        """Load the echo model, open a context, return both handles."""
        graph, context = self.handle(), self.handle()
        self.call(
            "load_by_name",
            w.LoadByNameParams(name="echo"),
            w.GraphResult(graph=graph, model="echo", fingerprint="echo-1", ctx_size=4096, slots=4),
        )
        self.call(
            "init_execution_context", w.GraphParams(graph=graph), w.ContextResult(context=context)
        )
        return graph, context

    def done(self) -> dict[str, Any]:
        """Return the exchange as the file has it."""
        return {"name": self.name, "frames": self.frames}


def daemon_hello() -> w.ServerHello:
    """Return the hello of a daemon with the default configuration."""
    return w.ServerHello(
        protocol=w.PROTOCOL_VERSION,
        software="inferd/0.1.0",
        instance=INSTANCE,
        limits=w.Limits(
            frame_bytes_max=FRAME_BYTES_MAX,
            nesting_max=NESTING_MAX,
            requests_max=w.REQUESTS_MAX,
            credit_default=w.CREDIT_DEFAULT,
            credit_max=w.CREDIT_MAX,
            tensor_bytes_max=w.TENSOR_BYTES_MAX,
            sessions_max=100,
        ),
        llama_commit="0c1e57098",
    )


def tensor(data: bytes) -> w.Tensor:
    """Return bytes as a tensor."""
    return w.Tensor(data=data, dimensions=[len(data)])


def computed() -> dict[str, Any]:
    """A prompt, computed whole: the shortest way through the wasi-nn calls."""
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
    """A stream with credit for two events; é comes in two tokens and is shown whole."""
    x = Exchange("stream")
    _, context = x.open()
    number = x.request("stream", w.StreamParams(context=context, prompt="hé!", credit=2))
    pieces = ((104, b"h"), (195, b""), (169, "é".encode()), (33, b"!"))
    for position, (token, text) in enumerate(pieces):
        x.event(number, w.TokensEvent(tokens=[token], text=text, position=position))
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
    """`compute` with named tensors: metadata, a prompt, an answer of the prompt's shape."""
    x = Exchange("compute with named tensors")
    _, context = x.open()
    inputs = [("metadata", tensor(b'{"seed":7,"n-predict":8}')), ("prompt", tensor(b"hey"))]
    x.call(
        "compute",
        w.ComputeParams(context=context, inputs=inputs),
        w.ComputeResult(
            outputs=[("output", w.Tensor(data=b"hey", dimensions=[3], type=w.TENSOR_TYPES["u8"]))],
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
    """Branches of a session's state, the way back, and the end of it all."""
    x = Exchange("branches")
    _, context = x.open()
    turn = w.StreamParams(context=context, prompt="hi", raw=True)
    x.call("chat", turn, w.TurnResult(text=b"hi", metadata=metadata(4, 3)))
    one, two = x.handle(), x.handle()
    x.call(
        "fork_session",
        w.ForkParams(context=context, n=2, session_ids=["a", "b"]),
        w.ForkResult(contexts=[one, two], tokens=6, kept_tokens=6),
    )
    x.call(
        "rewind",
        w.RewindParams(context=one, turns=1),
        w.RewindResult(),
    )
    x.call(
        "rewind",
        w.RewindParams(context=two, tokens=3),
        w.RewindResult(tokens=3, turns=1, kept_tokens=3),
    )
    x.call("forget", w.ForgetParams(session_id="b"), w.ForgetResult(forgotten=True))
    x.call("forget", w.ForgetParams(context=one), w.ForgetResult(forgotten=True))
    x.call("forget", w.ForgetParams(session_id="b"), w.ForgetResult(forgotten=False))
    return x.done()


def resumed() -> dict[str, Any]:
    """A turn that is left, come back to, and gone on with from what the client has of it."""
    x = Exchange("a turn that is gone on with")
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
    left = w.FinalizeParams(context=context, keep=True)
    x.call("finalize_execution_context", left, w.Empty())
    x.call(call, named, w.ContextResult(context=again, attached=True))
    number = x.request("resume", w.ResumeParams(context=again, tokens=[97], text=b"a"))
    for position, text in enumerate((b"b", b"c", b"d"), 1):
        x.event(number, w.TokensEvent(tokens=list(text), text=text, position=position))
    end = metadata(6, 5, session_id="notes", durable=True)
    x.reply(number, w.TurnResult(metadata=end), ["/2/metadata/cached_tokens"])
    return x.done()


def watched() -> dict[str, Any]:
    """Four readers that do not read hold the slots; a fifth turn waits and is told its place."""
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
    turn = w.StreamParams(context=contexts[4], prompt="hi", watch=True)
    number = x.request("stream", turn)
    x.event(number, w.QueueEvent(position=1, waiting=1, starts_in_s=6.4), ["/2/starts_in_s"])
    for position, text in enumerate((b"h", b"i")):
        x.event(number, w.TokensEvent(tokens=list(text), text=text, position=position))
    x.reply(number, w.TurnResult(metadata=metadata(4, 3)), ["/2/metadata/cached_tokens"])
    return x.done()


def passed() -> dict[str, Any]:
    """A prompt in a descriptor: `fd` 0 takes the one that came with the frame."""
    x = Exchange("a prompt in a descriptor")
    _, context = x.open()
    params = w.SetInputParams(context=context, index=0, tensor=w.Tensor(dimensions=[5], fd=0))
    x.call("set_input", params, w.Empty(), descriptors=[b"hello".hex()])
    x.call("compute", w.ComputeParams(context=context), w.ComputeResult())
    x.call("get_output", w.GetOutputParams(context=context), w.OutputResult(data=b"hello"))
    return x.done()


def embedded() -> dict[str, Any]:
    """Return texts that become vectors, and a context that makes one."""
    x = Exchange("embeddings")
    graph, context = x.open()
    texts = w.EmbedParams(graph=graph, texts=["hi", "you"], pooling="last", normalize=-1)
    vectors = [array("f", echo_rows([258, *text.encode(), 257])[-1]) for text in texts.texts]
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
    told = Embedded(0, EMBEDDING_SIZE, "last", vectors[0].tobytes())
    output = w.OutputResult(data=embedding_json(told))
    x.call("get_output", w.GetOutputParams(context=context), output)
    return x.done()


EXCHANGES = (
    computed, streamed, single, named, natural, embedded, branched, resumed, watched, passed
)  # fmt: skip


def framed(body: bytes) -> bytes:
    """Return *body* with its length before it."""
    return struct.pack("<I", len(body)) + body


def case(
    name: str, frames: list[Any], outcome: dict[str, Any], *, hello: bool = True
) -> dict[str, Any]:
    """Return one malformed case; frames are messages, or bytes as they stand."""
    raw = [f if isinstance(f, bytes) else pack(f) for f in frames]
    return {"name": name, "hello": hello, "frames": [f.hex() for f in raw], "outcome": outcome}


def nested(depth: int) -> bytes:
    """Return a request that nests *depth* deep."""
    arrays = b"\x91" * (depth - 2)
    return framed(b"\x94\x01\x01\xa5queue\x81\xa1x" + arrays + b"\x00")


def error(name: str) -> dict[str, Any]:
    """Return the outcome of a request that is refused."""
    return {"error": name}


def goodbye(name: str) -> dict[str, Any]:
    """Return the outcome of a connection that is ended."""
    return {"goodbye": name}


def malformed() -> list[dict[str, Any]]:
    """What ends a connection."""
    protocol, queue = goodbye("ProtocolError"), [1, 1, "queue", {}]
    return [
        case(
            "a frame longer than the limit",
            [struct.pack("<I", FRAME_BYTES_MAX + 1)],
            goodbye("TooLarge"),
        ),
        case("an empty frame", [framed(b"")], protocol),
        case("no array", [framed(b"\x81\xa1a\x01")], protocol),
        case("an array without items", [framed(b"\x90")], protocol),
        case("an array cut short", [framed(b"\x94\x01\x01\xa5que")], protocol),
        case("bytes after the array", [framed(b"\x94\x01\x01\xa5queue\x80\x00")], protocol),
        case("nested one too deep", [nested(NESTING_MAX + 1)], protocol),
        case("a kind that is no integer", [["1", 1, "queue", {}]], protocol),
        case("an unknown kind", [[9, 1]], protocol),
        case("a kind that only the daemon sends", [[2, 1, {}]], protocol),
        case("a second hello", [[0, {"protocol": [1, 0]}]], protocol),
        case("a request without params", [[1, 1, "queue"]], protocol),
        case("an id that is no integer", [[1, "one", "queue", {}]], protocol),
        case("credit for an id that is no integer", [[5, "one", 1]], protocol),
        case("no hello first", [queue], protocol, hello=False),
        case("a hello without a version", [[0, {"software": "x"}]], protocol, hello=False),
        case(
            "another major version",
            [[0, {"protocol": [2, 0]}]],
            goodbye("VersionMismatch"),
            hello=False,
        ),
    ]


def refused() -> list[dict[str, Any]]:
    """What a request is refused for; the connection goes on."""
    argument = error("InvalidArgument")
    missing = (INSTANCE << 32) - 1
    strange = framed(
        b"\x94\x01\x01\xabset_options\x82\xa7context\x01\xa7options\x81\xa1a\x81\x81\x01\x02\x03"
    )
    return [
        case("an unknown call", [[1, 1, "make_tea", {}]], error("UnsupportedOperation")),
        case("a call that is no text", [[1, 1, 7, {}]], argument),
        case("params that are no map", [[1, 1, "queue", []]], argument),
        case("a field missing", [[1, 1, "show", {}]], argument),
        case("a field of the wrong type", [[1, 1, "show", {"name": 7}]], argument),
        case(
            "a text that is no UTF-8",
            [framed(b"\x94\x01\x01\xa4show\x81\xa4name\xa2\xff\xfe")],
            argument,
        ),
        case("a map with a map for a key", [strange], argument),
        case("a handle that never was", [[1, 1, "compute", {"context": missing}]], argument),
        case("a graph that never was", [[1, 1, "unload", {"graph": missing}]], argument),
        case("a descriptor that was not passed", [[1, 1, "load", {"fd": 0}]], argument),
        case("cancel without a target", [[1, 1, "cancel", {}]], argument),
        case("forget without a target", [[1, 1, "forget", {}]], argument),
        case("a way back without a goal", [[1, 1, "rewind", {"context": missing}]], argument),
        case("no builder", [[1, 1, "load", {}]], argument),
        case(
            "a builder too long for a name",
            [[1, 1, "load", {"builders": [b"G" * 257]}]],
            error("TooLarge"),
        ),
        case(
            "an encoding that is not run here",
            [[1, 1, "load", {"builders": [b"echo"], "encoding": "onnx"}]],
            error("InvalidEncoding"),
        ),
        case(
            "an encoding by its number",
            [[1, 1, "load", {"builders": [b"echo"], "encoding": 0}]],
            error("InvalidEncoding"),
        ),
        case(
            "a target that is not there",
            [[1, 1, "load", {"builders": [b"echo"], "target": "tpu"}]],
            error("UnsupportedOperation"),
        ),
        case(
            "an unknown model", [[1, 1, "load_by_name", {"name": "nobody"}]], error("ModelNotFound")
        ),
        case(
            "a configuration that is no JSON",
            [[1, 1, "load_by_name_with_config", {"name": "echo", "config": "{"}]],
            error("InvalidEncoding"),
        ),
        case(
            "a parameter out of its range",
            [[1, 1, "load_by_name_with_config", {"name": "echo", "config": '{"temp":-1}'}]],
            argument,
        ),
    ]


def ignored() -> list[dict[str, Any]]:
    """What is not looked at."""
    nothing: dict[str, Any] = {"reply": {"tasks": []}}
    queue = [1, 1, "queue", {}]
    return [
        case("an unknown field is ignored", [[1, 1, "queue", {"colour": "green"}]], nothing),
        case("more items than a request has are ignored", [[1, 1, "queue", {}, "more"]], nothing),
        case("credit for a request that is over is ignored", [[5, 77, 1], queue], nothing),
        case(
            "another minor version is welcome",
            [[0, {"protocol": [1, 9], "new": True}], queue],
            nothing,
            hello=False,
        ),
    ]


def malformed_daemon() -> list[dict[str, Any]]:
    """What a client must take from a daemon that is newer, refuses, or is broken."""
    reply = [2, 1, {"tasks": []}]
    full = Busy("256 connections are open", data={"retry_after_s": 1.0}).to_wire()
    new = {"name": "OutOfCheese", "number": 250, "message": "+++", "hint": "", "data": {}}
    spent = QuotaExceeded(
        "you have used 70 tokens; the limit is 60 a minute",
        data={"bound": "access.r.tokens-per-minute", "retry_after_s": 11.0},
    ).to_wire()
    nothing = PermissionDenied("user 1000 may do nothing here").to_wire()
    hello = msgspec.to_builtins(daemon_hello())
    return [
        case("a goodbye instead of the reply", [[6, full]], error("Busy")),
        case("an error of a name that is not known", [[3, 1, new]], error("Unknown")),
        case("a bound of the user's own", [[3, 1, spent]], error("QuotaExceeded")),
        case(
            "a frame longer than the limit",
            [struct.pack("<I", FRAME_BYTES_MAX + 1)],
            error("TooLarge"),
        ),
        case("no array", [framed(b"\x81\xa1a\x01")], error("ProtocolError")),
        case("a reply that is no map", [[2, 1, 7]], error("ProtocolError")),
        case("an unknown kind is ignored", [[9, "news"], reply], {"reply": {"tasks": []}}),
        case(
            "unknown fields are ignored",
            [[2, 1, {"tasks": [], "more": 1}]],
            {"reply": {"tasks": []}},
        ),
        case(
            "an event of a request that is over is ignored",
            [[4, 77, {}], reply],
            {"reply": {"tasks": []}},
        ),
        case(
            "another major version",
            [[0, hello | {"protocol": [2, 0]}]],
            error("VersionMismatch"),
            hello=False,
        ),
        case("a full daemon", [[0, hello], [6, full]], error("Busy"), hello=False),
        case("a stranger", [[0, hello], [6, nothing]], error("PermissionDenied"), hello=False),
    ]


def vectors() -> dict[str, Any]:
    """Return the whole file's content."""
    return {
        "about": ABOUT,
        "protocol": list(w.PROTOCOL_VERSION),
        "software": SOFTWARE,
        "exchanges": [exchange() for exchange in EXCHANGES],
        "malformed": malformed() + refused() + ignored(),
        "malformed_daemon": malformed_daemon(),
    }


def text() -> str:
    """Return the file's text."""
    return json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
    sys.stdout.write(f"wrote {PATH}\n")
