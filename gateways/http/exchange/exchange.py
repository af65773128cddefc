"""One request and its response: the HTTP status of each error, the seconds after which to retry, an
API as the gateway serves it, with its endpoints and the shape of its errors, and the daemon's
models, as the lists of all APIs need them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

import anyio
import anyio.to_thread
import msgspec
from msgspec import Struct

from ....backends import errors as e
from ....backends.errors import Cancelled, InferdError, ModelNotFound, Outcome, TooLarge
from ....ipc.client import ModelInfo
from ....ipc.model_names import offered_models
from ..bodies import BodyMemory
from ..callers import LOCAL, Caller, RequestKind
from ..fields import FieldTable, field_error
from ..limits import BODY_BYTES_MAX, VALUES_MAX, Limits, UnknownFields
from ..long_strings import LongBody
from .waiting import WaitingStreams

if TYPE_CHECKING:
    from ..turns import TurnRunner


class ErrorShape(Protocol):
    """The shape of an API's errors."""

    def error_body(self, error: InferdError, status: int) -> Any:
        """Return the JSON of an error response."""


class HttpRefusal(InferdError, outcome=Outcome.REFUSED):
    """A request that HTTP itself refuses: no key, another origin, no such path."""

    name = "Refused"
    status = 400

    def __init__(
        self, status: int, message: str, *, hint: str = "", param: str = "", allow: str = ""
    ):
        super().__init__(message, hint=hint, data={"param": param} if param else None)
        self.status, self.allow = status, allow


_STATUSES: tuple[tuple[type[InferdError], int], ...] = (
    (e.ProtocolError, 500),
    (e.PromptTooLong, 400),
    (e.ContextFull, 400),
    (e.InvalidArgument, 400),
    (e.InvalidEncoding, 400),
    (e.VersionMismatch, 502),
    (e.UnsupportedOperation, 400),
    (e.TooLarge, 413),
    (e.ModelNotFound, 404),
    (e.NotFound, 404),
    (e.SessionExpired, 404),
    (e.PermissionDenied, 403),
    (e.QuotaExceeded, 429),
    (e.SessionBusy, 409),
    (e.Busy, 503),
    (e.WorkerCrashed, 503),
    (e.ConnectionLost, 503),
    (e.OutOfMemory, 503),
    (e.Cancelled, 503),
)


def status_of(error: InferdError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, HttpRefusal):
        return error.status
    if isinstance(error, e.Timeout):
        return 503 if error.data.get("timeout") == "queue" else 504
    if isinstance(error, e.Cancelled) and error.data.get("by") == "supersede":
        return 409
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def retry_after_s(error: InferdError, status: int) -> int | None:
    """Return the seconds of the header Retry-After, or None without one."""
    if isinstance(error, e.Busy):
        return max(1, math.ceil(error.retry_after_s))
    return 1 if status in (429, 503) else None


log = logging.getLogger(__name__)

S = TypeVar("S", bound=Struct)
R = TypeVar("R")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
JSON = b"application/json"
IGNORED_HEADER = b"inferd-ignored"
"""The header of a response that names the fields of its request that have no effect."""
ADJUSTED_HEADER = b"inferd-adjusted"
"""The header of a whole response that has the parameters which were not applied as requested, such
as the constraints of a schema that were left out, with the reasons.
"""
_ADJUSTED_CHARACTERS_MAX = 1000
_BEFORE_VALUES = (b",", b"[", b"{")
_SAFE = " !#$&'()*+,/:;=?@[]"
"""Characters that are not escaped in that header."""
_IGNORED_MAX, _IGNORED_CHARACTERS_MAX = 32, 64
"""Names in that header, and characters of each."""
LINK = "inferd.link"
"""The name of the extension of a request's scope that has its `ClientLink`."""


class ClientLink(Protocol):
    """The client's connection, as one of its requests uses it beside ASGI."""

    response_id: str | None
    """The id for the response of a request of a job, or an empty text; None for clients."""

    @property
    def uid(self) -> int | None:
        """The user of a Unix socket's peer; None for other connections."""

    def take_place(self, caller: str) -> None:
        """Take one of the places for connections for the named *caller*, or without a name for the
        client's address, unless the connection has a place.

        :raises Busy: no place is free.
        """

    def withdraw_place(self) -> None:
        """Give the place back, because the caller is no longer known."""

    @property
    def unread(self) -> bool:
        """Whether the request has not arrived completely."""

    def linger(self) -> None:
        """Let the client read the response before its connection, which closes, is reset by the
        rest of the request. The headers of the response were sent, and announce the end.
        """

    @property
    def blocked(self) -> bool:
        """Whether a write would wait because the client does not read."""

    def write_now(self, data: bytes) -> bool:
        """Write a part of a body that has begun, if that is possible without waiting. Return
        whether it was written.
        """

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call *on_lost* when the client disconnects, until `unwatch`."""

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        """Stop calling *on_lost*."""


class Exchange:
    """A request, and its response as it is written. Its task owns it.

    `body` is set before the endpoint runs.
    """

    caller: Caller = LOCAL
    body: bytes | LongBody = b""
    started = ended = False

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Receive,
        send: Send,
        *,
        api: ErrorShape,
        turns: TurnRunner,
        limits: Limits,
        waiting: WaitingStreams,
        memory: BodyMemory,
        unknown_fields: UnknownFields = UnknownFields.IGNORE,
        test_models: bool = False,
    ):
        self.api, self.turns, self.limits, self.waiting = api, turns, limits, waiting
        self._unknown_fields = unknown_fields
        self.test_models = test_models
        """Whether test models are offered as others are."""
        self.adjusted: dict[str, str] = {}
        """The parameters that were not applied as requested, with the reasons."""
        self.ignored: list[str] = []
        """The first fields of the request that have no effect, by their places, shortened and with
        other characters than those of names escaped.
        """
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.params: Mapping[str, str] = scope["path_params"]
        self.scheme, self.query = (
            str(scope["scheme"]),
            scope.get("query_string", b"").decode("latin-1"),
        )
        self.headers: dict[str, str] = {}
        """The headers by their names in lower case. The lines of a list are joined (RFC 9110, 5.3);
        other headers that decide something have one line.
        """
        for name_bytes, value_bytes in scope["headers"]:
            name, value = name_bytes.decode("latin-1"), value_bytes.decode("latin-1")
            self.headers[name] = f"{self.headers[name]}, {value}" if name in self.headers else value
        self.cors: list[tuple[bytes, bytes]] = []
        """Headers that let a page of an allowed origin read the response."""
        self.cancel_scope = anyio.CancelScope()
        """The scope of the request's work, which is cancelled when the client disconnects."""
        self._receive, self._send = receive, send
        self.link: ClientLink = scope["extensions"][LINK]
        self._memory = memory
        self._taken, self._taken_more = 0, list[int]()
        """The bytes that were taken of the memory for long bodies: for the body, and for more."""

    async def read_body(self) -> None:
        """Read the whole body. A long one waits for memory before it is read.

        :raises TooLarge: the body is longer than allowed, or has too many values.
        :raises Busy: there was no memory for it in time.
        :raises HttpRefusal: the body does not arrive in time, or the client disconnects.
        """
        text = self.headers.get("content-length", "0")
        length = int(text) if text.isdecimal() and len(text) < 20 else 0
        self._check_size(length)
        await self._take_memory(length)
        has_media = self.limits.allows_media(self.path)
        body, more, values = bytearray(), True, 0
        with anyio.move_on_after(self.limits.receive_s_max) as scope:
            while more:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise HttpRefusal(400, "the client disconnected before the end of its request")
                part = message.get("body", b"")
                body += part
                more = message.get("more_body", False)
                self._check_size(len(body))
                if has_media:  # base64 has none of them, and is passed over faster than counted
                    values += sum(part.count(each) for each in _BEFORE_VALUES if each in part)
                if values > VALUES_MAX and len(body) > BODY_BYTES_MAX:
                    raise _too_many_values()
                if len(body) > max(BODY_BYTES_MAX, self._taken):  # its length was not announced
                    scope.deadline = math.inf
                    await self._take_memory(self.limits.body_bytes_max_of(self.path))
                    scope.deadline = anyio.current_time() + self.limits.receive_s_max
        if scope.cancelled_caught:
            seconds = self.limits.receive_s_max
            raise HttpRefusal(408, f"the request did not arrive within {seconds:g} s")
        if self._taken > len(body):  # its length was not announced
            self._memory.shrink(self.caller.name, self._taken, len(body))
            self._taken = len(body)
        is_long = has_media and len(body) > BODY_BYTES_MAX
        self.body = await self.run_in_thread(LongBody, body) if is_long else bytes(body)

    async def body_parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body of an endpoint that reads it itself.

        :raises HttpRefusal: a part does not arrive in time, or the client disconnects.
        """
        more = True
        while more:
            with anyio.move_on_after(self.limits.receive_s_max) as scope:
                message = await self._receive()
            if scope.cancelled_caught:
                seconds = self.limits.receive_s_max
                raise HttpRefusal(408, f"no part of the request has arrived for {seconds:g} s")
            if message["type"] == "http.disconnect":
                raise HttpRefusal(400, "the client disconnected before the end of its request")
            more = message.get("more_body", False)
            yield message.get("body", b"")

    async def take_memory(self, size: int) -> None:
        """Take memory for *size* bytes besides the body, unless they are few, for the rest of the
        request. A request that has memory already does not wait: two such could wait for each
        other.

        :raises Busy: there was no memory in time.
        """
        if size > BODY_BYTES_MAX:
            wait_s = 0.0 if self._taken or self._taken_more else self.limits.queue_s_max
            await self._memory.take(self.caller.name, size, wait_s)
            self._taken_more.append(size)

    def shrink_memory(self, size: int) -> None:
        """Give back what `take_memory` has taken beyond *size* bytes, once these are known."""
        if self._taken_more and size < self._taken_more[-1]:
            self._memory.shrink(self.caller.name, self._taken_more[-1], size)
            self._taken_more[-1] = size

    async def run_in_thread(self, function: Callable[..., R], *args: Any) -> R:
        """Run a function that takes long because of a long body, after those of other requests."""
        return await anyio.to_thread.run_sync(function, *args, limiter=self._memory.thread)

    async def _take_memory(self, size: int) -> None:
        """Take memory for a body of *size* bytes, unless it is short."""
        if size > BODY_BYTES_MAX:
            await self._memory.take(self.caller.name, size, self.limits.queue_s_max)
            self._taken = size

    def read_fields(
        self, table: FieldTable[S], value: dict[str, Any] | None = None, place: str = ""
    ) -> tuple[S, dict[str, Any]]:
        """Return the request's own fields by *table* and its parameters, and note those without
        effect. With *value*, read an object in the body, whose fields begin with *place*.

        :raises InferdError: as `FieldTable.read`.
        """
        body = self.body if value is None else value
        own, options, ignored = table.read(body, self._unknown_fields, place)
        if value is None and self._taken:
            self.body = b""  # else a long body stays in memory twice
        if ignored:
            shown = [quote(n[:_IGNORED_CHARACTERS_MAX], "") for n in ignored[:_IGNORED_MAX]]
            self.ignored = [*self.ignored, *shown][:_IGNORED_MAX]
            log.debug("fields.ignored path=%s fields=%s", self.path, ",".join(shown))
        return own, options

    def _check_size(self, size: int) -> None:
        size_max = self.limits.body_bytes_max_of(self.path)
        if size > size_max:
            raise self._too_large(size, size_max)

    def _too_large(self, size: int, size_max: int) -> TooLarge:
        hint = "send less"
        if self.limits.lowers_body_bytes_of(self.path):
            hint += ", or start the gateway with a larger --body-bytes-max"
        return TooLarge(
            f"the body of the request has {size} bytes; {self.path[:200]} allows {size_max}",
            hint=hint,
            data={"bytes": size, "body_bytes_max": size_max},
        )

    def end_when_disconnected(self) -> None:
        """Cancel the request's work when the client disconnects."""
        self.link.watch(self._end_work)

    def _end_work(self) -> None:
        if not self.ended:
            self.cancel_scope.cancel()

    def close(self) -> None:
        """Stop watching the connection, and give the memory that was taken back."""
        self.link.unwatch(self._end_work)
        for size in (self._taken, *self._taken_more):
            if size:
                self._memory.give_back(self.caller.name, size)
        self._taken, self._taken_more = 0, list[int]()

    async def start(
        self, status: int, content_type: bytes, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        """Send the status and the headers."""
        self.started = True
        fields = [(b"content-type", content_type), *self.cors, *(headers or ())]
        if self.ignored:
            fields.append((IGNORED_HEADER, ", ".join(self.ignored).encode()))
        if self.adjusted:
            text = "; ".join(f"{name}: {reason}" for name, reason in self.adjusted.items())
            fields.append((ADJUSTED_HEADER, quote(text[:_ADJUSTED_CHARACTERS_MAX], _SAFE).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body; wait while the client does not read."""
        self.ended = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def send_whole(
        self,
        data: bytes,
        *,
        status: int = 200,
        content_type: bytes = JSON,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        """Send a whole response."""
        fields = [(b"content-length", str(len(data)).encode()), *(headers or ())]
        unread = self.link.unread
        if unread:  # and the rest is not read
            fields.append((b"connection", b"close"))
        await self.start(status, content_type, fields)
        if unread:
            self.link.linger()
        await self.write(data, more=False)

    async def send_parts(
        self, parts: AsyncIterable[bytes], content_type: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        """Send a response in parts, each of which the client has to read before the next one is
        made. If that fails, the response is cut, which clients notice.
        """
        await self.start(200, content_type, headers)
        if self.method != "HEAD":
            async for part in parts:
                await self.write(part)
        await self.write(b"", more=False)

    async def send_json(
        self,
        value: Any,
        *,
        status: int = 200,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        await self.send_whole(msgspec.json.encode(value), status=status, headers=headers)

    async def send_error(self, error: InferdError) -> None:
        """Send an error in the shape of the API; only possible before the start of a response."""
        headers = []
        status = status_of(error)
        retry_s = retry_after_s(error, status)
        if retry_s is not None:
            headers.append((b"retry-after", str(retry_s).encode()))
        if isinstance(error, Cancelled):  # OpenAI's clients would send the request again
            headers.append((b"x-should-retry", b"false"))
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, HttpRefusal) and error.allow:
            headers.append((b"allow", error.allow.encode()))
        body = msgspec.json.encode(self.api.error_body(error, status))
        await self.send_whole(body, status=status, headers=headers)


def _too_many_values() -> TooLarge:
    return TooLarge(
        f"the request has more than {BODY_BYTES_MAX} bytes, and more than {VALUES_MAX} commas and"
        " brackets",
        hint="send less besides images and sounds",
        data={"values_max": VALUES_MAX},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A function that answers the requests of a method and a path, such as ``/v1/models/{model}``.

    With *header*, it answers only requests that have this header; an endpoint without one answers
    the others. An endpoint that *reads_body* gets the body in parts. One of *tensors* decompresses
    it, and it may be binary. A *public* endpoint needs no key, and its requests count towards no
    bound. *kind* is the bound towards which the requests of others count.
    """

    method: str
    path: str
    answer: Callable[[Exchange], Awaitable[None]]
    header: str = ""
    public: bool = False
    kind: RequestKind = RequestKind.COMPUTE
    reads_body: bool = False
    tensors: bool = False


class Api(ErrorShape, Protocol):
    """The endpoints of an API and the shape of its errors."""

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """The endpoints."""

    @property
    def prefixes(self) -> Sequence[str]:
        """The beginnings of paths whose errors have this API's shape."""

    @property
    def title(self) -> str:
        """The name of the API in the documentation."""

    @property
    def tables(self) -> Sequence[FieldTable[Any]]:
        """The tables of its requests' fields, for the documentation."""

    @property
    def error_schema(self) -> Mapping[str, Any]:
        """The JSON schema of its errors."""


_SHOWN_AT_ONCE = 16
"""Models of one list whose headers are requested at the same time."""


async def usable_models(exchange: Exchange, *, loaded: bool = False) -> list[ModelInfo]:
    """Return the models that are offered to the caller, or all *loaded* ones that it may use, each
    with the facts in its file's header.
    """
    caller = exchange.caller
    async with exchange.turns.pool.lease(caller) as client:
        models = await client.models()
        if loaded:
            found = [info for info in models if caller.may_use(info["name"]) and info["info"]]
        else:
            found = offered_to(caller, models, test_models=exchange.test_models)
        limiter = anyio.CapacityLimiter(_SHOWN_AT_ONCE)

        async def show(number: int, name: str) -> None:
            async with limiter:
                with suppress(ModelNotFound):  # the operator has removed it meanwhile
                    found[number] = await client.show(name)

        try:
            async with anyio.create_task_group() as group:
                for number, info in enumerate(found):
                    group.start_soon(show, number, info["name"])
        except* InferdError as errors:
            error = errors.exceptions[0]
            assert isinstance(error, InferdError), "tasks of this group have no groups of their own"
            raise error from None
    return found


def offered_to(caller: Caller, models: list[ModelInfo], *, test_models: bool) -> list[ModelInfo]:
    """Return the models that are offered to a caller, whose key may name test models."""
    usable = [info for info in models if caller.may_use(info["name"])]
    return offered_models(usable, named=caller.models or (), test_models=test_models)


async def chosen_model(exchange: Exchange, name: str) -> str:
    """Return *name*, or the only model that a request without a name can mean.

    :raises InvalidArgument: there are none, or several.
    """
    if name:
        return name
    async with exchange.turns.pool.lease(exchange.caller) as client:
        models = offered_to(
            exchange.caller, await client.models(), test_models=exchange.test_models
        )
    names = [info["name"] for info in models]
    loaded = [info["name"] for info in models if info["info"]]
    for found in (names, loaded):
        if len(found) == 1:
            return found[0]
    raise field_error(
        "model",
        f"model: it is absent, and {len(names)} models are offered",
        hint="name the model, or restrict the key to one by `models` in the file of keys",
    )


def served_ctx_size(info: Mapping[str, Any]) -> int | None:
    """Return the tokens of a session's context: those of the loaded model or, as far as they are
    known, of its next load.
    """
    known = (info.get("info"), info.get("estimate"))
    sizes = [int((facts or {}).get("ctx_size") or 0) for facts in known]
    configured = int((info.get("options") or {}).get("ctx-size") or 0)
    found = next(filter(None, (*sizes, configured)), None)
    # The context of another name may be smaller than that of the process that it shares.
    return min(found, configured) if info.get("of") and found and configured else found
