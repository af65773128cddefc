"""The functions of the module `wasi_ephemeral_nn`, as guests import them.

All parameters and results are i32. A function returns an error's number, or 0. Its other results
are written to pointers, which are checked before a call does anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...backends.errors import BackendError, InferdError, TooLarge
from .. import guests
from .dialects import Dialect, check_encoding, error_number
from .guest import BlockingLink, Guest
from .guest_memory import GuestMemory

if TYPE_CHECKING:
    from wasmtime import Caller, Linker

    from ...ipc.client import Client
    from ...ipc.priorities import Priority

MODULE = "wasi_ephemeral_nn"
ErrorSink = Callable[[str, InferdError], object]
_U32 = 4


def add_to_linker(
    linker: Linker,
    client: Client,
    *,
    connect: Callable[[], Client] | None = None,
    preloads: Mapping[str, guests.Preload] | None = None,
    priority: Priority = "normal",
    timeout: float | None = None,
    dialect: Dialect = "wasmedge",
    unchecked_output: bool = False,
    contexts_max: int = guests.CONTEXTS_MAX,
    write_text: Callable[[bytes], object] | None = None,
    on_error: ErrorSink | None = None,
) -> Guest:
    """Define wasi-nn's functions in *linker* for one guest; close the returned object after it.

    *connect* returns a new client after a restart of the daemon; the default is a copy of *client*,
    with its label and the user on whose behalf it acts.
    *preloads* are the models that the guest may load; without any, it may load all. Once *timeout*
    seconds have passed from now, the next call traps with `Timeout`. *write_text* gets the answers
    of guests that set `stream-stdout`; by default they go to standard output. *on_error* gets the
    name of a call and its error; the guest gets only a number.
    """
    from wasmtime import FuncType, ValType

    guest = new_guest(
        client,
        connect=connect,
        preloads=preloads,
        priority=priority,
        timeout=timeout,
        contexts_max=contexts_max,
        write_text=write_text,
    )
    host = HostFunctions(guest, dialect, unchecked_output=unchecked_output, on_error=on_error)
    for name, (size, function) in host.functions().items():
        kind = FuncType([ValType.i32()] * size, [ValType.i32()])
        linker.define_func(MODULE, name, kind, host.entry(name, function), access_caller=True)
    return guest


def new_guest(
    client: Client,
    *,
    connect: Callable[[], Client] | None,
    preloads: Mapping[str, guests.Preload] | None,
    priority: Priority,
    timeout: float | None,
    contexts_max: int = guests.CONTEXTS_MAX,
    write_text: Callable[[bytes], object] | None = None,
) -> Guest:
    """Return a guest without graphs; the parameters are those of `add_to_linker`."""
    link = BlockingLink(client, connect or client.copy, timeout)
    return Guest(
        guests.Guest(
            guests.Remote(link, priority),
            preloads=preloads or {},
            write_text=write_text or write_to_stdout,
            contexts_max=contexts_max,
        )
    )


def write_to_stdout(data: bytes) -> None:
    """Write to the standard output of this process, unless its reader has closed it.

    :raises BackendError: standard output cannot be written, such as to a full disk.
    """
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        return
    except OSError as exc:
        raise BackendError(
            f"standard output cannot be written: {exc.strerror}",
            hint="free space there, or write it elsewhere",
        ) from None


class HostFunctions:
    """The functions for one guest. Each gets the guest's memory and its arguments as u32."""

    def __init__(
        self, guest: Guest, dialect: Dialect, *, unchecked_output: bool, on_error: ErrorSink | None
    ):
        self._guest, self._dialect, self._on_error = guest, dialect, on_error
        self._unchecked_output = unchecked_output

    def functions(self) -> dict[str, tuple[int, Callable[..., None]]]:
        """Return, by name, each function and the number of its parameters."""
        guest = self._guest
        on_handles = (
            *(guest.compute, guest.compute_single, guest.fini_single),
            *(guest.unload, guest.finalize_execution_context),
        )
        return {
            "load": (5, self._load),
            "load_by_name": (3, self._load_by_name),
            "load_by_name_with_config": (5, self._load_by_name_with_config),
            "init_execution_context": (2, self._init_execution_context),
            "set_input": (3, self._set_input),
            "get_output": (5, self._writer(guest.get_output)),
            "get_output_single": (5, self._writer(guest.get_output_single)),
            **{call.__name__: (1, _without_memory(call)) for call in on_handles},
        }

    def entry(self, name: str, function: Callable[..., None]) -> Callable[..., int]:
        """Return the function that wasmtime calls. It returns an error's number, and raises only
        errors that end the guest.
        """

        def call(caller: Caller, *arguments: int) -> int:
            memory = caller.get("memory")
            if not hasattr(memory, "data_len"):
                raise BackendError("the guest exports no memory", hint="export it as `memory`")
            self._guest.in_call = True
            try:
                function(GuestMemory(memory, caller), *(a & 0xFFFF_FFFF for a in arguments))
            except InferdError as exc:
                self._guest.check_deadline()
                if self._on_error is not None:
                    self._on_error(name, exc)
                return error_number(self._dialect, exc)
            finally:
                self._guest.in_call = False
            return 0

        return call

    def _load(
        self, memory: GuestMemory, builders: int, number: int, encoding: int, target: int, out: int
    ) -> None:
        memory.check_range(out, _U32)
        check_encoding(self._dialect, encoding)
        memory.write_u32(out, self._guest.load(memory.read_builders(builders, number), target))

    def _load_by_name(self, memory: GuestMemory, name: int, size: int, out: int) -> None:
        memory.check_range(out, _U32)
        memory.write_u32(out, self._guest.load_by_name(memory.read(name, size)))

    def _load_by_name_with_config(
        self, memory: GuestMemory, name: int, size: int, config: int, config_size: int, out: int
    ) -> None:
        memory.check_range(out, _U32)
        texts = memory.read(name, size), memory.read(config, config_size)
        memory.write_u32(out, self._guest.load_by_name(*texts))

    def _init_execution_context(self, memory: GuestMemory, graph: int, out: int) -> None:
        memory.check_range(out, _U32)
        memory.write_u32(out, self._guest.init_execution_context(graph))

    def _set_input(self, memory: GuestMemory, context: int, index: int, tensor: int) -> None:
        self._guest.set_input(context, index, memory.read_tensor(tensor))

    def _writer(self, read: Callable[[int, int], bytes]) -> Callable[..., None]:
        """Return a function that writes the output's size, and the output if it fits the buffer."""

        def write(
            memory: GuestMemory, context: int, index: int, buffer: int, size: int, written: int
        ) -> None:
            memory.check_range(written, _U32)
            memory.check_range(buffer, size)
            data = read(context, index)
            memory.write_u32(written, len(data))
            if len(data) > size and not (self._unchecked_output and size == 0):
                raise TooLarge(
                    f"an output of {len(data)} bytes does not fit into a buffer of {size}",
                    hint="give a larger buffer; --unchecked-output is for guests that pass 0",
                    data={"needed": len(data)},
                )
            memory.write(buffer, data)

        return write


def _without_memory(call: Callable[[int], None]) -> Callable[[GuestMemory, int], Any]:
    return lambda memory, handle: call(handle)
