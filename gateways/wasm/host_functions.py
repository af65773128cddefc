"""The functions of the module `wasi_ephemeral_nn`, as guests import them, and a guest's memory:
checked reads and writes, and the layouts of wasi-nn in it.

All parameters and results are i32. A function returns an error's number, or 0. Its other results
are written to pointers, which are checked before a call does anything.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...backends.errors import BackendError, InferdError, InvalidArgument, TooLarge
from ...backends.tensors import Tensor
from .. import guests
from .dialects import Dialect, encoding_name, error_number
from .guest import BlockingLink, Guest

if TYPE_CHECKING:
    from wasmtime import Caller, Linker, Memory

    from ...ipc.client import Client
    from ...ipc.names import Priority

BUILDERS_MAX = 16
DIMENSIONS_MAX = 64
"""Dimensions of a tensor; more are ignored, as they are of texts."""
_TENSOR = struct.Struct("<IIB3xII")
"""Pointer and number of the dimensions, type, pointer and size of the data. The type is one byte,
which some guests write as four.
"""
_BUILDER = struct.Struct("<II")


class GuestMemory:
    """The memory of the guest that calls a host function, during this call.

    The guest does not run meanwhile, so its memory neither grows nor moves: its size and address
    are read once. wasmtime's own methods read them several times for each access.
    """

    def __init__(self, memory: Memory, caller: Caller):
        self._memory, self._caller = memory, caller

    @cached_property
    def _size(self) -> int:
        return int(self._memory.data_len(self._caller))

    @cached_property
    def _start(self) -> int:
        return ctypes.addressof(self._memory.data_ptr(self._caller).contents)

    def check_range(self, address: int, size: int) -> None:
        """Check that the guest's memory has *size* bytes at *address*.

        :raises InvalidArgument: the memory ends before that.
        """
        if address + size > self._size:
            raise InvalidArgument(
                f"{size} bytes at {address:#x} are outside of the memory of {self._size} bytes",
                hint="the guest passed a wrong pointer or size",
            )

    def read(self, address: int, size: int) -> bytes:
        """Return *size* bytes at *address*."""
        self.check_range(address, size)
        # Not `string_at`, which takes the size as a C int: -1 would mean "up to a zero byte".
        return (ctypes.c_char * size).from_address(self._start + address).raw if size else b""

    def write(self, address: int, data: bytes) -> None:
        """Write *data* at *address*."""
        self.check_range(address, len(data))
        if data:
            ctypes.memmove(self._start + address, data, len(data))

    def write_u32(self, address: int, number: int) -> None:
        """Write a u32 at *address*."""
        self.write(address, struct.pack("<I", number))

    def read_tensor(self, address: int) -> Tensor:
        """Return the tensor recorded at *address*."""
        record = self.read(address, _TENSOR.size)
        dimensions, dimensions_len, kind, data, size = _TENSOR.unpack(record)
        self.check_range(dimensions, 4 * dimensions_len)
        shape = self.read(dimensions, 4 * min(dimensions_len, DIMENSIONS_MAX))
        return Tensor(self.read(data, size), struct.unpack(f"<{len(shape) // 4}I", shape), kind)

    def read_builders(self, address: int, number: int) -> list[bytes]:
        """Return the builders of a graph, whose records are at *address*."""
        if number > BUILDERS_MAX:
            raise InvalidArgument(f"{number} builders", hint="the first names a model")
        records = self.read(address, _BUILDER.size * number)
        return [self.read(*record) for record in _BUILDER.iter_unpack(records)]


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
    image_directories: Sequence[guests.ImageDirectory] = (),
    on_error: ErrorSink | None = None,
) -> Guest:
    """Define wasi-nn's functions in *linker* for one guest; close the returned object after it.

    *connect* returns a new client after a restart of the daemon; the default is a copy of *client*,
    with its label and the user on whose behalf it acts.
    *preloads* are the models that the guest may load; without any, it may load all. Once *timeout*
    seconds have passed from now, the next call traps with `Timeout`. *write_text* gets the answers
    of guests that set `stream-stdout`; by default they go to standard output. The guest may name
    images in *image_directories* with the key `image`. *on_error* gets the
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
        image_directories=image_directories,
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
    image_directories: Sequence[guests.ImageDirectory] = (),
) -> Guest:
    """Return a guest without graphs; the parameters are those of `add_to_linker`."""
    link = BlockingLink(client, connect or client.copy, timeout)

    async def read_image(path: str) -> bytes:
        return guests.read_image(image_directories, path)

    return Guest(
        guests.Guest(
            guests.Remote(link, priority),
            preloads=preloads or {},
            write_text=write_text or write_to_stdout,
            read_image=read_image,
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
        name = encoding_name(self._dialect, encoding)
        found = memory.read_builders(builders, number)
        memory.write_u32(out, self._guest.load(found, target, name))

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
