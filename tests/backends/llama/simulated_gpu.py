"""A GPU that llama.cpp computes with on the CPU, in memory that it takes for the device's own.

A copy of the CPU's entry in ggml's list of devices, with another kind, name and type of buffer. So
the placement of weights, their memory and the results with layers on a GPU show on any machine.
ggml keeps devices until the process ends.
"""

from __future__ import annotations

import ctypes
from typing import Any

from inferd.backends.llama.loading.devices import c_function

__all__ = ("NAME", "add_simulated_gpu")

NAME = "Simulated0"
MEMORY_BYTES = 1 << 30
_CPU, _GPU = 0, 1
"""`ggml_backend_dev_type`."""
_pointer = ctypes.c_void_p
_by_type = c_function("ggml_backend_dev_by_type", _pointer, ctypes.c_int)
_cpu_buffers = c_function("ggml_backend_cpu_buffer_type", _pointer)
_register = c_function("ggml_backend_device_register", None, _pointer)
_name = ctypes.create_string_buffer(NAME.encode())
_of_device = ctypes.CFUNCTYPE(_pointer, _pointer)
_to_backend = ctypes.CFUNCTYPE(_pointer, _pointer, _pointer)
_to_kind = ctypes.CFUNCTYPE(ctypes.c_int, _pointer)
_to_memory = ctypes.CFUNCTYPE(None, _pointer, *[ctypes.POINTER(ctypes.c_size_t)] * 2)
_supports = ctypes.CFUNCTYPE(ctypes.c_bool, _pointer, _pointer)


class _Properties(ctypes.Structure):
    """`ggml_backend_dev_props`; the capabilities are false."""

    _fields_ = (
        ("name", _pointer),
        ("description", _pointer),
        ("free", ctypes.c_size_t),
        ("total", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("id", _pointer),
        ("capabilities", ctypes.c_bool * 5),
    )


_to_properties = ctypes.CFUNCTYPE(None, _pointer, ctypes.POINTER(_Properties))


class _Device(ctypes.Structure):
    """`ggml_backend_device`."""

    _fields_ = (
        ("get_name", _of_device),
        ("get_description", _pointer),
        ("get_memory", _to_memory),
        ("get_type", _to_kind),
        ("get_props", _to_properties),
        ("init_backend", _to_backend),
        ("get_buffer_type", _of_device),
        ("get_host_buffer_type", _pointer),
        ("buffer_from_host_ptr", _pointer),
        ("supports_op", _pointer),
        ("supports_buft", _supports),
        *((name, _pointer) for name in ("offload_op", "event_new", "event_free", "event_wait")),
        *((name, _pointer) for name in ("registry", "context")),
    )


class _BufferType(ctypes.Structure):
    """`ggml_backend_buffer_type`."""

    _fields_ = (
        ("get_name", _of_device),
        *((name, _pointer) for name in ("alloc", "alignment", "max_size", "alloc_size", "is_host")),
        *((name, _pointer) for name in ("device", "context")),
    )


class _Backend(ctypes.Structure):
    """`ggml_backend`: an identifier, 16 functions, the device and a context."""

    _fields_ = (("id", _pointer), ("functions", _pointer * 16), ("device", _pointer))


def add_simulated_gpu() -> Any:
    """Add the GPU to ggml's devices, and return objects that have to stay alive."""
    cpu = _Device.from_address(_by_type(_CPU))
    device, buffers = _Device.from_buffer_copy(cpu), _BufferType()
    address = ctypes.addressof(device)

    def write_memory(_device: int, free: Any, total: Any) -> None:
        free[0] = total[0] = MEMORY_BYTES

    def write_properties(_device: int, found: Any) -> None:
        found[0] = _Properties(
            ctypes.addressof(_name), ctypes.addressof(_name), MEMORY_BYTES, MEMORY_BYTES, _GPU
        )

    def open_backend(_device: int, parameters: int) -> int:
        backend: int = cpu.init_backend(ctypes.addressof(cpu), parameters)
        _Backend.from_address(backend).device = address
        return backend

    ctypes.pointer(buffers)[0] = _BufferType.from_address(_cpu_buffers())
    buffers.get_name = device.get_name = _of_device(lambda _: ctypes.addressof(_name))
    buffers.device, buffers.is_host = address, None
    device.get_memory, device.get_type = _to_memory(write_memory), _to_kind(lambda _: _GPU)
    device.get_props = _to_properties(write_properties)
    device.init_backend = _to_backend(open_backend)
    device.get_buffer_type = _of_device(lambda _: ctypes.addressof(buffers))
    device.supports_buft = _supports(lambda _, found: found == ctypes.addressof(buffers))
    device.buffer_from_host_ptr = None
    _register(address)
    return device, buffers
