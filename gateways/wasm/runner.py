"""One guest in this process: its engine with limits, its WASI environment, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wasmtime import (
    Config,
    Engine,
    ExitTrap,
    Instance,
    Linker,
    Module,
    Store,
    Trap,
    TrapCode,
    WasiConfig,
    WasmtimeError,
)

from ...backends.errors import BackendError, InvalidArgument, UnsupportedOperation
from ..guests import guest_timeout
from .watchdog import Ending, Watchdog

if TYPE_CHECKING:
    from .guest import Guest

TABLES_MAX, TABLE_ELEMENT_BYTES = 4, 16
"""A guest with limited memory has at most this many tables. At this size of an element, they take
at most the same amount of memory again.
"""


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


def run_program(
    program: Program, add_functions: Callable[[Linker], Guest], give_up: Callable[[Ending], object]
) -> int:
    """Run a guest and return its exit status. Must be called in the main thread.

    *add_functions* defines the functions of wasi-nn. *give_up* ends this process; it is called if
    the guest has to end, but waits in a function of WASI.

    :raises InvalidArgument: the file is not a WebAssembly program.
    :raises Timeout: the guest has reached its deadline.
    :raises BackendError: the guest trapped.
    """
    engine = Engine(_engine_config(program))
    with Watchdog(program.timeout_s, engine.increment_epoch, give_up) as watchdog:
        try:
            return _run(engine, program, add_functions, watchdog)
        except ExitTrap as exc:
            return int(exc.code)
        except (Trap, WasmtimeError) as exc:
            if watchdog.ending == "interrupted":
                raise KeyboardInterrupt from None
            if watchdog.ending == "timeout":
                raise guest_timeout(program.timeout_s or 0.0) from None
            raise _error_of(exc) from None


def _error_of(exc: Trap | WasmtimeError) -> BackendError:
    """Return the error for a guest that trapped. The last line of wasmtime's message has the
    reason, the others have the guest's stack.
    """
    spent = isinstance(exc, Trap) and exc.trap_code is TrapCode.OUT_OF_FUEL
    hint = "raise --fuel" if spent else "the error is in the guest"
    return BackendError(f"the guest trapped: {_lines(exc)[-1]}", hint=hint)


def _lines(exc: Trap | WasmtimeError) -> list[str]:
    return [line.strip() for line in str(exc).splitlines() if line.strip()] or ["unknown"]


def _engine_config(program: Program) -> Config:
    config = Config()
    config.epoch_interruption = True
    config.consume_fuel = program.fuel is not None
    return config


def _run(
    engine: Engine,
    program: Program,
    add_functions: Callable[[Linker], Guest],
    watchdog: Watchdog,
) -> int:
    module = _read_module(engine, program.path)
    linker, store = Linker(engine), Store(engine)
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
    linker.define_wasi()
    guest = add_functions(linker)
    watchdog.may_raise = lambda: guest.in_call
    try:
        instance = _instantiate(linker, store, module)
        start = instance.exports(store).get("_start")
        if not callable(start):
            raise InvalidArgument(f"{program.path} has no function _start", hint="run a program")
        start(store)
    finally:
        guest.disconnect()
    return 0


def _instantiate(linker: Linker, store: Store, module: Module) -> Instance:
    try:
        return linker.instantiate(store, module)
    except ExitTrap:
        raise
    except WasmtimeError as exc:
        raise UnsupportedOperation(
            f"the guest cannot be started: {_lines(exc)[-1]}",
            hint="guests have WASI preview 1, wasi_ephemeral_nn and --memory-bytes",
        ) from None


def _read_module(engine: Engine, path: Path) -> Module:
    try:
        return Module(engine, path.read_bytes())
    except OSError as exc:
        raise InvalidArgument(f"{path} cannot be read: {exc.strerror}") from None
    except WasmtimeError as exc:
        raise InvalidArgument(
            f"{path} is not a WebAssembly module: {_lines(exc)[0]}",
            hint="compile the guest for wasm32-wasip1; components run in programs (inferd.wasm)",
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
