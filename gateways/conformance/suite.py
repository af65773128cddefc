"""The suite's cases by name, the server that they run against, and their results."""

from __future__ import annotations

import fnmatch
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from .peer import Connection, ErrorReceived, Failure, Map, Skipped, check

END_S_MAX = 1.0
"""How long the suite waits at the end of a case for the server to close its connections too."""
Check = Callable[["Server"], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One rule of the protocol page and the function that checks it."""

    name: str
    section: str
    """The heading of the page that states the rule."""
    rule: str
    check: Check
    ends_server: bool = False


CASES: list[Case] = []
"""All cases."""


def case(section: str) -> Callable[[Check], Check]:
    """Register a function as a case of *section*; its docstring is the rule."""

    def register(function: Check) -> Check:
        module = function.__module__.rpartition(".")[2]
        rule = " ".join((function.__doc__ or "").split())
        add_case(f"{module}.{function.__name__}", section, rule, function)
        return function

    return register


def add_case(
    name: str, section: str, rule: str, function: Check, *, ends_server: bool = False
) -> None:
    """Register a case under a unique name; one that *ends_server* runs after all others."""
    assert rule, name
    assert name not in {c.name for c in CASES}, name
    CASES.append(Case(name, section, rule, function, ends_server))


class Result(msgspec.Struct, frozen=True):
    """The outcome of a case; `detail` says how the rule was broken, or why it was not checked."""

    name: str
    section: str
    rule: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """Choices of the user of the suite."""

    socket: str
    model: str = "echo"
    timeout_s: float = 10.0
    """The longest wait for a message."""
    patience_s: float = 0.0
    """The longest wait for something that the server does by itself, such as an expiry."""
    drain: bool = False
    """Whether the server may be drained at the end."""


class Server:
    """The server as one case uses it; it keeps the case's connections, and closes them."""

    def __init__(self, options: SuiteOptions, label: str):
        self.options = options
        self.label = label
        self._open: list[Connection] = []

    @property
    def model(self) -> str:
        """The name of the echo model."""
        return self.options.model

    def connect(self, *, raw: bool = False, **hello: Any) -> Connection:
        """Return a connection after both hellos; on a *raw* one, neither was sent or read."""
        greeting = None if raw else {"label": self.label, **hello}
        connection = Connection(self.options.socket, self.options.timeout_s, greeting)
        self._open.append(connection)
        if not raw:
            connection.read_hello()
        return connection

    def graph(self, connection: Connection, config: str = "", model: str = "") -> int:
        """Return a new graph of the echo model."""
        name = model or self.model
        result = connection.call("load_by_name_with_config", name=name, config=config)
        return int(result["graph"])

    def context(self, connection: Connection, config: str = "", model: str = "") -> int:
        """Return a new context of the echo model."""
        graph = self.graph(connection, config, model)
        return int(connection.call("init_execution_context", graph=graph)["context"])

    def connected(self, config: str = "", model: str = "") -> tuple[Connection, int]:
        """Return a new connection and a context on it."""
        connection = self.connect()
        return connection, self.context(connection, config, model)

    def fixture(self, name: str) -> str:
        """Return the name of an optional model of the fixture.

        :raises Skipped: the server does not have it.
        """
        models = self.connect().call("models")["models"]
        if name not in {model["name"] for model in models}:
            raise Skipped(f"the server has no model {name!r}")
        return name

    def wait_until(self, holds: Callable[[], bool], broken: str) -> None:
        """Poll until *holds* returns true; fail with *broken* after the user's `timeout_s`."""
        end = time.monotonic() + self.options.timeout_s
        while not holds():
            check(time.monotonic() < end, broken)
            time.sleep(0.005)

    def patience(self, seconds: float) -> float:
        """Return the longest wait for something that the server does after *seconds*.

        :raises Skipped: *seconds* is more than the user's `patience_s`.
        """
        if self.options.patience_s < seconds:
            raise Skipped(f"it takes {seconds:g} s; --patience is {self.options.patience_s:g} s")
        return seconds + self.options.timeout_s

    def close(self) -> None:
        """Close the case's connections; the server may take up to `END_S_MAX` to close its own."""
        until = time.monotonic() + min(END_S_MAX, self.options.timeout_s)
        for connection in self._open:
            connection.end(until)
        self._open.clear()


@contextmanager
def paused_stream(
    server: Server, text: str = "abcd", **params: Any
) -> Iterator[tuple[Connection, int, int]]:
    """Yield a connection, a context and the id of its stream, which waits for credit."""
    connection, context = server.connected()
    params = {"context": context, "prompt": text, "raw": True, "credit": 1, **params}
    number = connection.start("stream", params)
    connection.wait_events(number, 1)
    try:
        yield connection, context, number
    finally:
        connection.close()  # once its client only reads, the server still waits for credit


def set_input(connection: Connection, context: int, data: bytes, index: int = 0) -> Map:
    """Set an input of a context."""
    return connection.call("set_input", context=context, index=index, tensor={"data": data})


def output(connection: Connection, context: int, **params: Any) -> bytes:
    """Return an output of a context."""
    return bytes(connection.call("get_output", context=context, **params)["data"])


def metadata(connection: Connection, context: int) -> Map:
    """Return output 1, decoded."""
    return dict(msgspec.json.decode(output(connection, context, index=1)))


def expect(refused: ErrorReceived, *names: str) -> ErrorReceived:
    """Check that an error has one of these names."""
    check(refused.name in names, f"the error is {refused}, not {' or '.join(names)}")
    return refused


def selected(patterns: Sequence[str], cases: Sequence[Case]) -> list[Case]:
    """Return the cases whose names match one of the patterns, or all cases without patterns, in
    the order in which they run.
    """
    chosen = [
        c for c in cases if not patterns or any(fnmatch.fnmatchcase(c.name, p) for p in patterns)
    ]
    return sorted(chosen, key=lambda c: c.ends_server)


def run_cases(options: SuiteOptions, cases: Sequence[Case]) -> list[Result]:
    """Run the cases one after another and return their results."""
    label = f"conformance-{secrets.token_hex(6)}"
    return [run_case(options, case, label) for case in cases]


def run_case(options: SuiteOptions, subject: Case, label: str) -> Result:
    """Run one case."""
    server = Server(options, label)
    begin = time.monotonic()
    outcome: Literal["passed", "failed", "skipped"] = "passed"
    detail = ""
    try:
        subject.check(server)
    except Skipped as exc:
        outcome, detail = "skipped", str(exc)
    except (Failure, ErrorReceived) as exc:
        outcome, detail = "failed", str(exc)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as exc:
        # The case used a field that the reply lacks, or that has another type.
        outcome, detail = "failed", f"unexpected reply: {type(exc).__name__}: {exc}"
    except OSError as exc:
        outcome, detail = "failed", f"cannot use the socket: {exc}"
    finally:
        server.close()
    seconds = round(time.monotonic() - begin, 4)
    return Result(subject.name, subject.section, subject.rule, outcome, detail[:500], seconds)
