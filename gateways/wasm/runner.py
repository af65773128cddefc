"""One guest in this process: its engine with limits, its WASI environment, and its end, which is
forced at its deadline, or by Ctrl-C while it runs WebAssembly code.
"""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from wasmtime import (
    Config,
    Engine,
    ExitTrap,
    Linker,
    Module,
    Store,
    Trap,
    WasiConfig,
    WasmtimeError,
    component,
    wat2wasm,
)

from ...backends.errors import (
    BackendError,
    InferdError,
    InvalidArgument,
    UnsupportedOperation,
)
from ..guests import guest_timeout

if TYPE_CHECKING:
    from .guest import Guest

Ending: TypeAlias = Literal["timeout", "interrupted"]
GRACE_S = 0.25
"""The time in which an interrupted guest has to end. One that takes longer waits in a function of
WASI, for input or a clock.
"""


class Watchdog:
    """A thread that ends a guest at its deadline or at SIGINT, while its `with` block runs.

    The main thread runs WebAssembly code, in which Python handles no signal. So this thread calls
    *interrupt*, which makes that code trap, and *give_up* if the guest has not ended after
    `GRACE_S`. `ending` is the reason, or None. A signal raises KeyboardInterrupt only while
    `may_raise` returns true; elsewhere the exception would crash the process in callbacks of
    wasmtime that do not expect it.
    """

    def __init__(
        self,
        timeout_s: float | None,
        interrupt: Callable[[], object],
        give_up: Callable[[Ending], object],
    ):
        self.ending: Ending | None = None
        self.may_raise: Callable[[], bool] = lambda: True
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._interrupt, self._give_up = interrupt, give_up
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="inferd-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._signals, self._written = socket.socketpair()
        self._written.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        self._handler = signal.getsignal(signal.SIGINT)
        if self._handler is signal.default_int_handler:  # otherwise Ctrl-C is ignored already
            signal.signal(signal.SIGINT, self._handle_interrupt)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        signal.signal(signal.SIGINT, self._handler)
        signal.set_wakeup_fd(self._previous)
        self._written.close()
        self._thread.join()
        self._signals.close()

    def _handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.may_raise():
            raise KeyboardInterrupt

    def _watch(self) -> None:
        self.ending = self._wait_for_reason()
        if self.ending is not None:
            self._interrupt()
            if not self._ended.wait(GRACE_S):
                self._give_up(self.ending)

    def _wait_for_reason(self) -> Ending | None:
        """Return why the guest has to end, or None when it has ended."""
        while True:
            wait_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            readable, _, _ = select.select([self._signals], [], [], wait_s)
            if not readable:
                return "timeout"
            numbers = self._signals.recv(4096)
            if not numbers:
                return None
            if signal.SIGINT in numbers:
                return "interrupted"


TABLES_MAX, TABLE_ELEMENT_BYTES = 4, 16
"""A guest with limited memory has at most this many tables. At this size of an element, they take
at most the same amount of memory again.
"""
_COMPONENT_LAYER = b"\1\0"
"""The bytes 6 and 7 of a component's file; those of a core module are zero."""
_RUN = "wasi:cli/run@"
Prepared: TypeAlias = "tuple[Guest, Callable[[], int]]"


@dataclass(frozen=True)
class Program:
    """A guest's file, its arguments, environment and directories, and its limits.

    Each of `directories` is its name for the guest, its path, and whether the guest may change it.
    """

    path: Path
    arguments: Sequence[str] = ()
    environment: Sequence[tuple[str, str]] = ()
    directories: Sequence[tuple[str, str, bool]] = ()
    timeout_s: float | None = None
    memory_bytes: int | None = None
    fuel: int | None = None


def check_guest(path: Path) -> None:
    """Check that the guest's file can be read.

    :raises InvalidArgument: the file cannot be read.
    """
    try:
        path.open("rb").close()
    except OSError as exc:
        raise InvalidArgument(
            f"{path} cannot be read: {exc.strerror}", hint="name the guest's WebAssembly file"
        ) from None


@dataclass(frozen=True)
class WasiNn:
    """The functions that define wasi-nn in the linker of a core module and of a component."""

    add_to_linker: Callable[[Linker], Guest]
    add_component_to_linker: Callable[[component.Linker], Guest]


def run_program(program: Program, wasi_nn: WasiNn, give_up: Callable[[Ending], object]) -> int:
    """Run a core module or a component and return its exit status. Must be called in the main
    thread.

    *give_up* ends this process; it is called if the guest has to end, but waits in a function of
    WASI.

    :raises InvalidArgument: the file is not a WebAssembly program.
    :raises Timeout: the guest has reached its deadline.
    :raises BackendError: the guest trapped.
    """
    engine = Engine(_engine_config(program))
    with Watchdog(program.timeout_s, engine.increment_epoch, give_up) as watchdog:
        try:
            return _run(engine, program, wasi_nn, watchdog)
        except ExitTrap as exc:
            return int(exc.code)
        except (Trap, WasmtimeError) as exc:
            if watchdog.ending == "interrupted":
                raise KeyboardInterrupt from None
            if watchdog.ending == "timeout":
                raise guest_timeout(program.timeout_s or 0.0) from None
            raise _error_of(exc) from None


def _error_of(exc: Trap | WasmtimeError) -> BackendError:
    """Return the error for a guest that trapped."""
    reason = _reason(exc)
    hint = "raise --fuel" if "all fuel consumed" in reason else "the error is in the guest"
    return BackendError(f"the guest trapped: {reason}", hint=hint)


def _reason(exc: Trap | WasmtimeError) -> str:
    """Return the line of wasmtime's message that has the reason: the last one below the guest's
    stack, else the first.
    """
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()] or ["unknown"]
    return lines[-1 if "backtrace" in lines[0] else 0]


def _engine_config(program: Program) -> Config:
    config = Config()
    config.epoch_interruption = True
    config.consume_fuel = program.fuel is not None
    return config


def _run(engine: Engine, program: Program, wasi_nn: WasiNn, watchdog: Watchdog) -> int:
    binary = _read_binary(program.path)
    store = _new_store(engine, program)
    prepare = _prepare_component if binary[6:8] == _COMPONENT_LAYER else _prepare_module
    guest, start = prepare(engine, store, binary, program.path, wasi_nn)
    watchdog.may_raise = lambda: guest.in_call
    try:
        return start()
    except WasmtimeError:
        if isinstance(guest.ended_by, InferdError | KeyboardInterrupt):
            raise guest.ended_by from None
        raise
    finally:
        guest.disconnect()


def _read_binary(path: Path) -> bytes:
    """Return a guest's WebAssembly, which its file may have as text."""
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise InvalidArgument(f"{path} cannot be read: {exc.strerror}") from None
    if content.startswith(b"\0"):
        return content
    with _compiling(path):
        return bytes(wat2wasm(content))


@contextmanager
def _compiling(path: Path) -> Iterator[None]:
    try:
        yield
    except WasmtimeError as exc:
        raise InvalidArgument(
            f"{path} is not a WebAssembly program: {_reason(exc)}",
            hint="compile the guest for wasm32-wasip1 or wasm32-wasip2",
        ) from None


def _new_store(engine: Engine, program: Program) -> Store:
    """Return a store with the guest's limits and its WASI environment."""
    store = Store(engine)
    store.set_epoch_deadline(1)
    if program.memory_bytes is not None:
        store.set_limits(
            memory_size=program.memory_bytes,
            memories=1,
            table_elements=program.memory_bytes // TABLES_MAX // TABLE_ELEMENT_BYTES,
            tables=TABLES_MAX,
        )
    if program.fuel is not None:
        store.set_fuel(program.fuel)
    store.set_wasi(_wasi_config(program))
    return store


def _prepare_module(
    engine: Engine, store: Store, binary: bytes, path: Path, wasi_nn: WasiNn
) -> Prepared:
    """Return the guest of a core module, and the function that runs it."""
    with _compiling(path):
        module = Module(engine, binary)
    linker = Linker(engine)
    linker.define_wasi()

    def start() -> int:
        with _instantiating():
            instance = linker.instantiate(store, module)
        function = instance.exports(store).get("_start")
        if not callable(function):
            raise InvalidArgument(f"{path} has no function _start", hint="run a program")
        function(store)
        return 0

    return wasi_nn.add_to_linker(linker), start


def _prepare_component(
    engine: Engine, store: Store, binary: bytes, path: Path, wasi_nn: WasiNn
) -> Prepared:
    """Return the guest of a component, and the function that runs it."""
    with _compiling(path):
        compiled = component.Component(engine, binary)
    linker = component.Linker(engine)
    linker.add_wasip2()
    names = [name for name in compiled.type.exports(engine) if name.startswith(_RUN)]
    if not names:
        raise InvalidArgument(f"{path} does not export {_RUN[:-1]}", hint="run a program")

    def start() -> int:
        with _instantiating():
            instance = linker.instantiate(store, compiled)
        exported = instance.get_export_index(store, names[0])
        index = instance.get_export_index(store, "run", exported)
        function = None if index is None else instance.get_func(store, index)
        assert function is not None, "wasi:cli/run has the function run"
        return 0 if function(store).tag == "ok" else 1

    return wasi_nn.add_component_to_linker(linker), start


@contextmanager
def _instantiating() -> Iterator[None]:
    try:
        yield
    except ExitTrap:
        raise
    except WasmtimeError as exc:
        raise UnsupportedOperation(
            f"the guest cannot be started: {_reason(exc)}",
            hint="guests have WASI preview 1 and wasi_ephemeral_nn, or WASI 0.2 and wasi:nn, and"
            " --memory-bytes",
        ) from None


def _wasi_config(program: Program) -> WasiConfig:
    wasi = WasiConfig()
    wasi.argv = [str(program.path), *program.arguments]
    wasi.env = program.environment
    wasi.inherit_stdin()
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    for name, path, writable in program.directories:
        try:
            wasi.preopen_dir(path, name, writable)
        except WasmtimeError:
            raise InvalidArgument(f"the directory {path} cannot be opened") from None
    return wasi
