"""A WebAssembly module that passes calls on to wasi-nn, driven step by step from Python."""

from __future__ import annotations

import json
import struct
from typing import Any

from wasmtime import Engine, Func, Instance, Linker, Memory, Module, Store

from inferd import Client
from inferd.gateways.wasm import add_to_linker

__all__ = ("Driver", "OUTSIDE", "SIGNATURES")

SIGNATURES = {
    "load": 5,
    "load_by_name": 3,
    "load_by_name_with_config": 5,
    "init_execution_context": 2,
    "set_input": 3,
    "get_output": 5,
    "get_output_single": 5,
    "compute": 1,
    "compute_single": 1,
    "fini_single": 1,
    "unload": 1,
    "finalize_execution_context": 1,
}
PAGE_BYTES = 65536
OUTSIDE = 0xFFFF_FFF0
"""An address that no memory of these tests has."""


def forwarding_module(pages: int, *, exports_memory: bool = True) -> str:
    """Return the text of a module with one function for each of wasi-nn's, which calls it."""
    lines = ["(module"]
    for name, size in SIGNATURES.items():
        kind = f"(param {' '.join(['i32'] * size)}) (result i32)"
        lines.append(f'(import "wasi_ephemeral_nn" "{name}" (func ${name} {kind}))')
    export = '(export "memory")' if exports_memory else ""
    lines.append(f"(memory {export} {pages})")
    for name, size in SIGNATURES.items():
        kind = f"(param {' '.join(['i32'] * size)}) (result i32)"
        arguments = " ".join(f"local.get {i}" for i in range(size))
        lines.append(f'(func (export "{name}") {kind} {arguments} call ${name})')
    return "\n".join((*lines, ")"))


class Driver:
    """A guest whose calls are made by the test. `call` returns the number of the error."""

    def __init__(
        self, client: Client, *, pages: int = 4, exports_memory: bool = True, **settings: Any
    ):
        engine = Engine()
        linker = Linker(engine)
        self.store = Store(engine)
        self.errors: list[tuple[str, Exception]] = []
        settings.setdefault("on_error", lambda name, error: self.errors.append((name, error)))
        self.guest = add_to_linker(linker, client, **settings)
        module = Module(engine, forwarding_module(pages, exports_memory=exports_memory))
        self.instance: Instance = linker.instantiate(self.store, module)
        self._next = 1024
        self.size = pages * PAGE_BYTES

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.guest.close()

    @property
    def memory(self) -> Memory:
        found = self.instance.exports(self.store)["memory"]
        assert isinstance(found, Memory)
        return found

    def call(self, name: str, *arguments: int) -> int:
        function = self.instance.exports(self.store)[name]
        assert isinstance(function, Func)
        signed = [a - (1 << 32) if a >= 1 << 31 else a for a in arguments]
        return int(function(self.store, *signed))

    def put(self, data: bytes) -> int:
        """Write *data* to unused memory and return its address."""
        address, self._next = self._next, self._next + len(data) + 16
        assert self._next < self.size, "the test needs more pages"
        if data:
            self.memory.write(self.store, data, address)
        return address

    def read(self, address: int, size: int) -> bytes:
        return bytes(self.memory.read(self.store, address, address + size))

    def number_at(self, address: int) -> int:
        (number,) = struct.unpack("<I", self.read(address, 4))
        return int(number)

    # Calls that have to succeed.

    def load(self, name: str = "echo", config: object = None) -> int:
        name_at, out = self.put(name.encode()), self.put(bytes(4))
        if config is None:
            number = self.call("load_by_name", name_at, len(name.encode()), out)
        else:
            text = config.encode() if isinstance(config, str) else json.dumps(config).encode()
            arguments = name_at, len(name.encode()), self.put(text), len(text), out
            number = self.call("load_by_name_with_config", *arguments)
        assert number == 0, self.errors
        return self.number_at(out)

    def init(self, graph: int) -> int:
        out = self.put(bytes(4))
        assert self.call("init_execution_context", graph, out) == 0, self.errors
        return self.number_at(out)

    def context(self, name: str = "echo", config: object = None) -> int:
        return self.init(self.load(name, config))

    def tensor(self, data: bytes, kind: int = 3, dimensions: tuple[int, ...] = (1,)) -> int:
        """Write the record of a tensor and return its address."""
        at = self.put(struct.pack(f"<{len(dimensions)}I", *dimensions))
        record = struct.pack("<IIIII", at, len(dimensions), kind, self.put(data), len(data))
        return self.put(record)

    def set_input(self, context: int, data: bytes | dict[str, object], index: int = 0) -> int:
        """Set an input, metadata as a dict, and return the number of the error."""
        if isinstance(data, dict):
            data, index = json.dumps(data).encode(), 1
        return self.call("set_input", context, index, self.tensor(data))

    def output(
        self, context: int, index: int = 0, *, single: bool = False, size: int = 8192
    ) -> bytes:
        buffer, written = self.put(bytes(size)), self.put(bytes(4))
        name = "get_output_single" if single else "get_output"
        assert self.call(name, context, index, buffer, size, written) == 0, self.errors
        self._next = buffer
        return self.read(buffer, self.number_at(written))

    def metadata(self, context: int) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self.output(context, 1))
        return decoded

    def pull(self, context: int, tokens: int) -> bytes:
        """Compute *tokens* tokens and return their text."""
        text = b""
        for _ in range(tokens):
            assert self.call("compute_single", context) == 0, self.errors
            text += self.output(context, single=True)
        return text
