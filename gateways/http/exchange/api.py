"""An API as the gateway serves it: its endpoints, and the shape of its errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..fields import FieldTable
from ..quotas import RequestKind
from .exchange import Exchange
from .statuses import ErrorShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A function that answers the requests of a method and a path, such as ``/v1/models/{model}``.

    With *header*, it answers only requests that have this header; an endpoint without one answers
    the others. A *public* endpoint needs no key, and its requests count towards no bound. *kind* is
    the bound towards which the requests of others count.
    """

    method: str
    path: str
    answer: Callable[[Exchange], Awaitable[None]]
    header: str = ""
    public: bool = False
    kind: RequestKind = RequestKind.COMPUTE


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
