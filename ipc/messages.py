"""The protocol's messages: what the frames hold. `docs/protocol.md` says the same in prose.

A frame is an array whose first item is its kind::

    [0, hello]                 first frame of each side
    [1, id, call, params]      request          client → daemon
    [2, id, result]            reply            daemon → client
    [3, id, error]             error reply      daemon → client
    [4, id, event]             event of a call  daemon → client
    [5, id, events]            credit           client → daemon
    [6, error]                 goodbye          daemon → client, then the connection closes

Params, results and events are maps; fields that one side does not know are ignored.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Literal

import msgspec

__all__ = (
    "CALLS",
    "CREDIT_MAX",
    "EMBED_TEXTS_MAX",
    "ENCODINGS",
    "PROTOCOL_VERSION",
    "TARGETS",
    "TENSOR_TYPES",
    "TRACEPARENT_CHARACTERS_MAX",
    "Call",
    "Kind",
    "Limits",
    "Tensor",
)

PROTOCOL_VERSION = (1, 0)
"""Major, minor. Another major version is refused with a readable error."""

CREDIT_DEFAULT = 64
CREDIT_MAX = 1024
REQUESTS_MAX = 256
TENSOR_BYTES_MAX = 64 << 20
"""Bytes of a prompt or tensor that is passed in a descriptor."""
EMBED_TEXTS_MAX = 256
"""Texts of one `embed`."""
TRACEPARENT_CHARACTERS_MAX = 128

ENCODINGS = {
    "openvino": 0, "onnx": 1, "tensorflow": 2, "pytorch": 3, "tensorflowlite": 4, "autodetect": 5,
    "ggml": 6, "neuralspeed": 7, "burn": 8, "whisper": 9, "mlx": 10, "piper": 11, "chattts": 12,
    "openvinogenai": 13, "bitnet": 14,
}  # fmt: skip
"""Graph encodings by WasmEdge's numbers; only ggml and autodetect are loaded."""

TARGETS = {"cpu": 0, "gpu": 1, "tpu": 2, "auto": 3, "npu": 4}
"""Execution targets; 0 to 3 are WasmEdge's numbers."""

TENSOR_TYPES = {"fp16": 0, "fp32": 1, "fp64": 2, "u8": 3, "i32": 4, "i64": 5, "bf16": 6}
"""Tensor types; 0 to 5 are WasmEdge's numbers."""


_SPAN = "(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
Traceparent = Annotated[
    str,
    msgspec.Meta(
        max_length=TRACEPARENT_CHARACTERS_MAX,
        pattern=rf"^(00-{_SPAN}|(?!00|ff)[0-9a-f]{{2}}-{_SPAN}(-[!-~]*)?)?\Z",
    ),
]
"""The span that a call is made in, as W3C's Trace Context writes it; empty: none."""


class Kind(IntEnum):
    """The first item of a frame."""

    HELLO = 0
    REQUEST = 1
    REPLY = 2
    ERROR = 3
    EVENT = 4
    CREDIT = 5
    GOODBYE = 6


class _Map(msgspec.Struct, kw_only=True, omit_defaults=True):
    pass


class Limits(_Map):
    """The bounds that the daemon announces in its hello."""

    frame_bytes_max: int
    nesting_max: int
    requests_max: int
    credit_default: int
    credit_max: int
    tensor_bytes_max: int
    sessions_max: int


class ClientHello(_Map):
    """The client's first frame: `software` is free text for the daemon's log."""

    protocol: tuple[int, int]
    software: str = ""


class ServerHello(_Map):
    """The daemon's first frame. `instance` is its start count: the upper half of its handles."""

    protocol: tuple[int, int]
    software: str
    instance: int
    limits: Limits
    llama_build_number: int = 0
    llama_commit: str = ""


class Tensor(_Map):
    """A wasi-nn tensor. `type` is a name or number of `TENSOR_TYPES`; `data` its bytes.

    A tensor too large for a frame travels in a memfd passed beside the frame: `fd` is then its
    place among the frame's descriptors, and `data` is empty.
    """

    data: bytes = b""
    dimensions: list[int] = []
    type: int | str = "u8"
    fd: int = -1


class Empty(_Map):
    """No fields."""


# wasi-nn calls.


class LoadParams(_Map):
    """`load`. A builder is a model's name, ``preload:NAME``, or, with `fd`, absent: the model is
    then the file behind that descriptor. `builders[1]` may hold metadata JSON.
    """

    builders: list[bytes] = []
    encoding: int | str = "autodetect"
    target: int | str = "auto"
    fd: int = -1
    progress: bool = False


class LoadByNameParams(_Map):
    """`load_by_name`; with `progress`, events tell how far the load is."""

    name: str
    progress: bool = False


class LoadByNameWithConfigParams(_Map):
    """`load_by_name_with_config`; `config` is a JSON text."""

    name: str
    config: str = ""
    progress: bool = False


class GraphResult(_Map):
    """A graph's handle, and what it stands for."""

    graph: int
    model: str = ""
    fingerprint: str = ""
    ctx_size: int = 0
    slots: int = 0
    not_applied: dict[str, Any] = {}
    ignored: list[str] = []


class GraphParams(_Map):
    """A call on a graph."""

    graph: int


class UnloadParams(_Map):
    """`unload`; with `keep` the lease ends, and the model stays for as long as the daemon keeps
    an idle one.
    """

    graph: int
    keep: bool = False


class SessionParams(_Map):
    """`init_execution_context_with_session_id`: an id of 1 to 128 characters, yours alone. Without
    `persist` nothing of the session is written to disk.
    """

    graph: int
    session_id: str
    persist: bool = True


class ContextResult(_Map):
    """A context's handle; `attached` tells that the session was there before, with its history."""

    context: int
    attached: bool = False


class ContextParams(_Map):
    """A call on an execution context."""

    context: int


class FinalizeParams(_Map):
    """`finalize_execution_context`; with `keep`, a session with an id sleeps until it is opened
    again. Without, nothing of it is kept.
    """

    context: int
    keep: bool = False


class SetInputParams(_Map):
    """`set_input`: index 1 is metadata JSON, any other a prompt."""

    context: int
    index: int
    tensor: Tensor


class ComputeParams(_Map):
    """`compute` on what `set_input` gave, or on named tensors; `priority` is a class's name."""

    context: int
    inputs: list[tuple[str, Tensor]] | None = None
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class ComputeResult(_Map):
    """The named outputs, where named inputs were given."""

    outputs: list[tuple[str, Tensor]] = []
    metadata: dict[str, Any] = {}


class ComputeSingleParams(_Map):
    """`compute_single`: the next token."""

    context: int
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class ComputeSingleResult(_Map):
    """What `get_output_single` would return now: it saves that call."""

    piece: bytes = b""


class GetOutputParams(_Map):
    """`get_output` and `get_output_single`; past `size_max` bytes (−1: no bound) `TooLarge`."""

    context: int
    index: int = 0
    size_max: int = -1


class OutputResult(_Map):
    """Bytes of an output; index 1 is JSON."""

    data: bytes


class PromptComputeParams(_Map):
    """`prompt_compute` of the prompt interface: text in, text out, the history is kept."""

    context: int
    prompt: str
    priority: str = ""
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class PromptComputeResult(_Map):
    """The answer's text."""

    text: str


class RunInferenceParams(_Map):
    """`run_inference` of apuslabs/wasi_nn_backend: one turn by the chat template."""

    context: int
    tensor: Tensor
    index: int = 0
    config: str = ""
    size_max: int = -1
    priority: str = ""
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class InitBackendParams(_Map):
    """`init_backend`: a JSON configuration; an operator's keys in it are ignored."""

    config: str = ""


class InitBackendResult(_Map):
    """The keys that were ignored."""

    ignored: list[str] = []


# Our own calls.


class StreamParams(_Map):
    """`stream` and `chat`: one turn.

    Without `prompt` and `messages` the context's input is computed (as `set_input` left it). With
    `prompt` or `messages` these are added to the history: by the chat template, or, with `raw`, as
    they stand. `options` hold for this turn.
    """

    context: int
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bool = False
    options: dict[str, Any] = {}
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""
    credit: int = CREDIT_DEFAULT
    watch: bool = False


class ResumeParams(_Map):
    """`resume`: go on with a turn that was interrupted. `tokens` and `text` are what the client has
    of it, from its start.
    """

    context: int
    tokens: list[int] = []
    text: bytes = b""
    reasoning: bytes = b""
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""
    credit: int = CREDIT_DEFAULT
    watch: bool = False


class QueueEvent(_Map):
    """With `watch`: a turn's place in the queue, told before its first token and where it changes.

    1 is the next to get a slot, of `waiting` in all; `starts_in_s` is when it is expected to.
    Events with `waiting` are these. They use no credit.
    """

    position: int
    waiting: int
    starts_in_s: float


class TokensEvent(_Map):
    """New tokens of a stream: `text` is what they release, whole UTF-8 characters; with `n-probs`
    `completion_probabilities` tells how likely they were, as llama-server does.
    """

    tokens: list[int] = []
    text: bytes = b""
    reasoning: bytes = b""
    position: int = 0
    completion_probabilities: list[dict[str, Any]] = []


class ProgressEvent(_Map):
    """How far a load is, 0 … 1."""

    progress: float


class TurnResult(_Map):
    """The end of a turn: `text` is the whole answer (`chat`), or what was left of it (`stream`)."""

    text: bytes = b""
    reasoning: bytes = b""
    metadata: dict[str, Any] = {}


class EmbedParams(_Map):
    """`embed`: the embeddings of texts. `pooling` is none, mean, cls, last or rank, empty for the
    model's own; `normalize` is -1 none, 0 a greatest number of 32760, 1 taxicab, 2 euclidean, p the
    p-norm.
    """

    graph: int
    texts: list[str]
    pooling: str = ""
    normalize: int = 2
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class EmbedResult(_Map):
    """One item a text: vectors of `size` float32 each, little-endian, one a token with the
    `pooling` none; `tokens` are those of each text.
    """

    embeddings: list[bytes]
    size: int
    pooling: str
    tokens: list[int] = []
    model: str = ""
    fingerprint: str = ""


class AnswersParams(_Map):
    """`answers`: `n` answers to one prompt; the other fields are those of `chat`."""

    context: int
    n: int = 2
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bool = False
    options: dict[str, Any] = {}
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class AnswersEvent(_Map):
    """The contexts of the answers, in their order, by which `cancel` ends one."""

    contexts: list[int] = []


class AnswersResult(_Map):
    """One map an answer: `text`, `reasoning`, `metadata`, `error`."""

    answers: list[dict[str, Any]]


class CancelParams(_Map):
    """`cancel`: a request of this connection by its id, or a context's turn by its handle."""

    request: int | None = None
    context: int | None = None


class CancelResult(_Map):
    """Whether there was something to cancel."""

    cancelled: bool


class ParkResult(_Map):
    """Whether the turn gives way: to others who wait for a slot."""

    parked: bool


class SystemParams(_Map):
    """`reset`: empty the history; `system` then is its first message, if given."""

    context: int
    system: str | None = None


class ForkParams(_Map):
    """`fork_session`: `n` branches of a context's present state, with ids of their own if given."""

    context: int
    n: int = 1
    session_ids: list[str] = []


class ForkResult(_Map):
    """The branches' handles; `kept_tokens` of their `tokens` need not be computed again."""

    contexts: list[int]
    tokens: int = 0
    kept_tokens: int = 0
    kv: str = "kept"


class RewindParams(_Map):
    """`rewind`: back by `turns`, or to the first `tokens` tokens; one of both is given."""

    context: int
    turns: int | None = None
    tokens: int | None = None


class RewindResult(_Map):
    """What is left: `tokens` of history, of which `kept_tokens` need not be computed again, and
    `turns` that one can still go back.
    """

    tokens: int = 0
    turns: int = 0
    kept_tokens: int = 0
    kv: str = "kept"


class ForgetParams(_Map):
    """`forget`: a context of this connection, or a session by its id; one of both is given."""

    context: int | None = None
    session_id: str | None = None


class ForgetResult(_Map):
    """Whether there was such a session."""

    forgotten: bool


class OptionsParams(_Map):
    """`set_options`: what holds for a context's turns from now on."""

    context: int
    options: dict[str, Any] = {}
    priority: str = ""


class ParametersResult(_Map):
    """`parameters`: each with `name`, `value` in force, `origin`, `adjusted`."""

    parameters: list[dict[str, Any]]


class NamesParams(_Map):
    """A call on a model by its name."""

    name: str
    force: bool = False


class NameParams(_Map):
    """`pin` and `unpin`: a model by its name."""

    name: str


class SwapParams(_Map):
    """`swap`: the model of name or file *to* takes over *name*."""

    name: str
    to: str
    mode: Literal["migrate", "drain"] = "migrate"


class SwapResult(_Map):
    """The fingerprints of the model that has the name now, and of the one that had it, if that was
    loaded, and how it was done.
    """

    fingerprint: str
    before: str = ""
    mode: str = "migrate"


class AddAdapterParams(_Map):
    """`add_adapter`: the model `name` gets the adapter in a `file` of the models directory, called
    `adapter`; `scale` holds for turns that choose none.
    """

    name: str
    adapter: str
    file: str
    scale: float = 0.0


class AddAdapterResult(_Map):
    """Whether it is in memory: it is checked then; `id` names its file's contents."""

    loaded: bool = False
    id: str = ""
    size_bytes: int = 0


class RemoveAdapterParams(_Map):
    """`remove_adapter`; with `force` the turns that use it fail."""

    name: str
    adapter: str
    force: bool = False


class ModelsResult(_Map):
    """One map a model: name, state, file, size_bytes, leases, contexts, …"""

    models: list[dict[str, Any]]


class SessionsParams(_Map):
    """`sessions`; `dormant` adds those that sleep under their id, `all` shows an operator those of
    all users.
    """

    dormant: bool = False
    all: bool = False


class SessionsResult(_Map):
    """One map a session."""

    sessions: list[dict[str, Any]]


class QueueParams(_Map):
    """`queue`; `all` shows an operator the tasks of all users."""

    all: bool = False


class QueueResult(_Map):
    """One map a task that waits or runs."""

    tasks: list[dict[str, Any]]


class StatsResult(_Map):
    """The daemon's figures."""

    stats: dict[str, Any]


class TokenizeParams(_Map):
    """`tokenize`: text to token ids; `special` reads special tokens' names as these."""

    graph: int
    text: str
    special: bool = False
    bos: bool = False


class TokensResult(_Map):
    """Token ids."""

    tokens: list[int]


class DetokenizeParams(_Map):
    """`detokenize`: token ids to bytes."""

    graph: int
    tokens: list[int]


class TextResult(_Map):
    """Bytes of a text."""

    text: bytes


class TemplateParams(_Map):
    """`apply_template`: the prompt that the chat template makes of messages, told of `tools` and of
    `arguments` of its own; with `add_generation_prompt` it ends where an answer begins.
    """

    graph: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {}
    add_generation_prompt: bool = True


class TemplateResult(_Map):
    """The prompt, and how many tokens it has."""

    text: bytes
    tokens: int = 0


class LogLevelParams(_Map):
    """`log_level`: levels by room, from now on."""

    levels: dict[str, str] = {}


class LogLevelResult(_Map):
    """The least level that is logged, by room."""

    levels: dict[str, str]


class DrainParams(_Map):
    """`drain`: finish what runs, take nothing new; with `stop` the daemon then ends."""

    stop: bool = False


class Call(msgspec.Struct, frozen=True):
    """What a call takes and answers; `events` are what it may send before its reply."""

    params: type[_Map]
    result: type[_Map]
    events: tuple[type[_Map], ...] = ()


CALLS: dict[str, Call] = {
    "load": Call(LoadParams, GraphResult, (ProgressEvent,)),
    "load_by_name": Call(LoadByNameParams, GraphResult, (ProgressEvent,)),
    "load_by_name_with_config": Call(LoadByNameWithConfigParams, GraphResult, (ProgressEvent,)),
    "init_execution_context": Call(GraphParams, ContextResult),
    "set_input": Call(SetInputParams, Empty),
    "compute": Call(ComputeParams, ComputeResult),
    "compute_single": Call(ComputeSingleParams, ComputeSingleResult),
    "get_output": Call(GetOutputParams, OutputResult),
    "get_output_single": Call(GetOutputParams, OutputResult),
    "fini_single": Call(ContextParams, Empty),
    "finalize_execution_context": Call(FinalizeParams, Empty),
    "unload": Call(UnloadParams, Empty),
    "prompt_init": Call(GraphParams, ContextResult),
    "prompt_compute": Call(PromptComputeParams, PromptComputeResult),
    "init_backend": Call(InitBackendParams, InitBackendResult),
    "deinit_backend": Call(Empty, Empty),
    "init_execution_context_with_session_id": Call(SessionParams, ContextResult),
    "close_execution_context": Call(FinalizeParams, Empty),
    "run_inference": Call(RunInferenceParams, TurnResult),
    "stream": Call(StreamParams, TurnResult, (TokensEvent, QueueEvent)),
    "chat": Call(StreamParams, TurnResult, (QueueEvent,)),
    "answers": Call(AnswersParams, AnswersResult, (AnswersEvent,)),
    "resume": Call(ResumeParams, TurnResult, (TokensEvent, QueueEvent)),
    "embed": Call(EmbedParams, EmbedResult),
    "cancel": Call(CancelParams, CancelResult),
    "park": Call(ContextParams, ParkResult),
    "reset": Call(SystemParams, Empty),
    "rewind": Call(RewindParams, RewindResult),
    "fork_session": Call(ForkParams, ForkResult),
    "forget": Call(ForgetParams, ForgetResult),
    "set_options": Call(OptionsParams, Empty),
    "parameters": Call(ContextParams, ParametersResult),
    "models": Call(Empty, ModelsResult),
    "show": Call(NamesParams, ModelsResult),
    "unload_model": Call(NamesParams, Empty),
    "pin": Call(NameParams, Empty),
    "swap": Call(SwapParams, SwapResult),
    "unpin": Call(NameParams, Empty),
    "add_adapter": Call(AddAdapterParams, AddAdapterResult),
    "remove_adapter": Call(RemoveAdapterParams, Empty),
    "sessions": Call(SessionsParams, SessionsResult),
    "queue": Call(QueueParams, QueueResult),
    "stats": Call(Empty, StatsResult),
    "tokenize": Call(TokenizeParams, TokensResult),
    "detokenize": Call(DetokenizeParams, TextResult),
    "apply_template": Call(TemplateParams, TemplateResult),
    "log_level": Call(LogLevelParams, LogLevelResult),
    "drain": Call(DrainParams, Empty),
}
