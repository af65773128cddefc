"""The ASGI application: routes to the endpoints of all APIs, checks of requests, and errors."""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import MutableMapping, Sequence
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskStatus

from ...backends.errors import BackendError, InferdError, InvalidArgument
from .bodies import BodyMemory
from .callers import LOCAL, Caller, Keys
from .clients import Clients
from .exchange import Api, Endpoint, Exchange, WaitingStreams
from .exchange.exchange import ADJUSTED_HEADER, IGNORED_HEADER, JSON, HttpRefusal, Receive, Send
from .heads import Origins, check_content
from .limits import Limits, UnknownFields
from .openapi import openapi_endpoint
from .turns import TurnRunner

log = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Found = list[tuple[Api, Endpoint]]
_PART = re.compile(r"\\{(\w+)(:path)?\\}")
"""A part of an endpoint's path in braces, after `re.escape`."""


class Routes:
    """The endpoints by path. A part `{name}` of an endpoint's path is any segment, and
    `{name:path}` any number of them. Paths without such parts come first.
    """

    def __init__(self, endpoints: Sequence[tuple[Api, Endpoint]]):
        self._fixed: dict[str, Found] = {}
        for api, endpoint in endpoints:
            self._fixed.setdefault(endpoint.path, []).append((api, endpoint))
        self._patterns = [
            (_pattern_of(path), self._fixed.pop(path)) for path in [*self._fixed] if "{" in path
        ]

    def find_endpoints(self, path: str) -> tuple[Found, dict[str, str]]:
        """Return the endpoints of a request's path, and its parts by name."""
        if path in self._fixed:
            return self._fixed[path], {}
        for pattern, found in self._patterns:
            if match := pattern.fullmatch(path):
                return found, match.groupdict()
        return [], {}


def _pattern_of(path: str) -> re.Pattern[str]:
    return re.compile(
        _PART.sub(lambda part: f"(?P<{part[1]}>{'.*' if part[2] else '[^/]+'})", re.escape(path))
    )


class Gateway:
    """The application. Its state belongs to the event loop."""

    def __init__(
        self,
        apis: Sequence[Api],
        turns: TurnRunner,
        limits: Limits,
        origins: Origins,
        keys: Keys | None = None,
        unknown_fields: UnknownFields = UnknownFields.IGNORE,
        test_models: bool = False,
    ):
        self.clients = Clients(limits)
        self._unknown_fields, self._test_models = unknown_fields, test_models
        self._apis, self._turns, self._limits = apis, turns, limits
        self._origins, self._keys, self._quotas = origins, keys, turns.quotas
        self._waiting = WaitingStreams()
        self._memory = BodyMemory(limits.bodies_bytes_max)
        endpoints = [(api, endpoint) for api in apis for endpoint in api.endpoints]
        self._routes = Routes([(apis[-1], openapi_endpoint(apis)), *endpoints])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or run until the server stops (`lifespan`)."""
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif scope["type"] == "http":
            await self._run_exchange(scope, receive, send)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with anyio.create_task_group() as group:
            await group.start(self.clients.run)
            group.start_soon(self._waiting.run)
            group.start_soon(self._turns.pool.run)
            if self._keys is not None:
                await group.start(self._reload_keys, self._keys)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            group.cancel_scope.cancel()
        self._turns.precheck.close()
        await self._turns.pool.close()
        await send({"type": "lifespan.shutdown.complete"})

    def stop(self) -> None:
        """End the streams that have no end of their own."""
        self._turns.stopping = True

    async def _reload_keys(
        self, keys: Keys, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Read the keys again at each SIGHUP."""
        with anyio.open_signal_receiver(signal.SIGHUP) as signals:
            task_status.started()
            async for _ in signals:
                try:
                    keys.reload()
                    log.warning("keys.reloaded")
                except InvalidArgument as exc:
                    log.error("keys.not_reloaded cause=%s", exc)  # the previous keys stay

    def _api_of(self, path: str) -> Api:
        """Return the API in whose shape an error of a path is written."""
        for api in self._apis:
            if path.startswith(tuple(api.prefixes)):
                return api
        return self._apis[-1]

    def refusal_body(self, path: str, refusal: HttpRefusal) -> bytes:
        """Return the body of the response to a request that the server could not read."""
        return msgspec.json.encode(self._api_of(path).error_body(refusal, refusal.status))

    async def _run_exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, run its endpoint, and write the error if it fails."""
        found, scope["path_params"] = self._routes.find_endpoints(scope["path"])
        api, endpoint = self._choose(scope, found)
        exchange = Exchange(
            *(scope, receive, send),
            api=api,
            turns=self._turns,
            limits=self._limits,
            waiting=self._waiting,
            memory=self._memory,
            unknown_fields=self._unknown_fields,
            test_models=self._test_models,
        )
        try:
            with exchange.cancel_scope:
                await self._run(exchange, endpoint, _methods_of(found))
        finally:
            exchange.close()

    def _choose(
        self, scope: Scope, found: Sequence[tuple[Api, Endpoint]]
    ) -> tuple[Api, Endpoint | None]:
        """Return the endpoint of a request; one that needs a header of the request comes first."""
        names = {name for name, _ in scope["headers"]}
        usable = [
            (api, endpoint)
            for api, endpoint in found
            if scope["method"] in _methods_of([(api, endpoint)])
            and (not endpoint.header or endpoint.header.encode() in names)
        ]
        if not usable:
            return self._api_of(scope["path"]), None
        return max(usable, key=lambda each: bool(each[1].header))

    async def _run(
        self, exchange: Exchange, endpoint: Endpoint | None, methods: Sequence[str]
    ) -> None:
        try:
            self._check_source(exchange)
            if exchange.method == "OPTIONS" and methods:
                return await self._answer_options(exchange, methods)
            if endpoint is None:
                raise _no_endpoint(exchange, methods)
            if endpoint.public:
                return await self._answer(exchange, endpoint)
            exchange.caller = self._identify(exchange)
            exchange.link.take_place(exchange.caller.name)
            self._quotas.begin_request(exchange.caller, time.monotonic(), endpoint.kind)
            try:
                await self._answer(exchange, endpoint)
            finally:
                self._quotas.end_request(exchange.caller, endpoint.kind)
        except InferdError as error:
            if not exchange.started:
                await exchange.send_error(error)

    async def _answer(self, exchange: Exchange, endpoint: Endpoint) -> None:
        if exchange.method in ("POST", "PATCH"):
            check_content(exchange.headers, tensors=endpoint.tensors)
        if not endpoint.reads_body:
            await exchange.read_body()
        exchange.end_when_disconnected()
        try:
            await endpoint.answer(exchange)
        except InferdError:
            raise
        except Exception:  # the only broad handler of a request
            log.exception("request.failed")
            raise BackendError("the gateway failed", hint="its log has the cause") from None

    def _check_source(self, exchange: Exchange) -> None:
        """Check the request's host and origin.

        :raises HttpRefusal: the host or the origin is not allowed.
        """
        host, origin = exchange.headers.get("host", ""), exchange.headers.get("origin")
        if not self._origins.allows_host(host):
            raise HttpRefusal(
                403,
                f"the host {host[:100]!r} is not this gateway's",
                hint="call it by its address, or start it with --allow-host NAME",
            )
        if origin is None:
            return _check_fetch(exchange)
        if not self._origins.allows_origin(origin, exchange.scheme, host):
            raise HttpRefusal(
                403,
                f"pages of {origin[:100]!r} may not call this gateway",
                hint="start it with --allow-origin ORIGIN",
            )
        if self._origins.is_listed(origin):
            exchange.cors = [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"vary", b"origin"),
                (b"access-control-expose-headers", IGNORED_HEADER + b", " + ADJUSTED_HEADER),
            ]

    async def _answer_options(self, exchange: Exchange, methods: Sequence[str]) -> None:
        """Answer with the methods of a path, also to the preflight of an allowed origin."""
        allowed = ", ".join(methods).encode()
        headers = [(b"allow", allowed)]
        if exchange.cors:
            # Clients send headers of their own, such as x-stainless-os; none has an effect here.
            wanted = exchange.headers.get("access-control-request-headers", "")
            headers += [
                (b"access-control-allow-methods", allowed),
                (b"access-control-allow-headers", wanted.encode("latin-1")),
                (b"access-control-max-age", b"600"),
            ]
        await exchange.start(204, JSON, headers)
        await exchange.write(b"", more=False)

    def _identify(self, exchange: Exchange) -> Caller:
        """Return the caller by its key; without a file of keys everybody is the same caller.

        :raises HttpRefusal: the request has no key, or an unknown one.
        """
        if self._keys is None:
            return LOCAL
        scheme, _, token = exchange.headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else exchange.headers.get("x-api-key", "")
        caller = self._keys.find_caller(key)
        if caller is None:
            exchange.link.withdraw_place()
            raise HttpRefusal(
                401,
                "the key is not known" if key else "the request has no key",
                hint="send the header `Authorization: Bearer KEY`",
            )
        return caller


def _methods_of(found: Sequence[tuple[Api, Endpoint]]) -> list[str]:
    """Return the methods of endpoints. HEAD is answered as GET; the server leaves the body out."""
    methods = {endpoint.method for _, endpoint in found}
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


def _no_endpoint(exchange: Exchange, methods: Sequence[str]) -> HttpRefusal:
    if methods:
        allowed = ", ".join(methods)
        message = f"{exchange.path} has no {exchange.method}"
        return HttpRefusal(405, message, hint=f"use {allowed}", allow=allowed)
    return HttpRefusal(
        404,
        f"there is no {exchange.path[:200]}",
        hint="check the path; `inferd gateway --help` names the APIs",
    )


def _check_fetch(exchange: Exchange) -> None:
    """Check a request without an origin, such as for an image in a page of another site. Such a
    request changes nothing, but takes a place. Links to the gateway are allowed.

    :raises HttpRefusal: by its headers, the request was sent by a page of another site.
    """
    site = exchange.headers.get("sec-fetch-site", "none")
    if site not in ("none", "same-origin") and exchange.headers.get("sec-fetch-mode") != "navigate":
        raise HttpRefusal(
            403,
            "pages of other sites may not call this gateway",
            hint="start it with --allow-origin ORIGIN",
        )
