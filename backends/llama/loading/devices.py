"""The devices other than the CPU that can run layers, and how much of a model each would hold.

`llama_get_memory_breakdown`, which llama.cpp's own fitting uses, returns a C++ map and is not
part of its stable interface. The engine is pinned, and a test compares the result with llama.cpp's
other reports.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from llama_cpp import llama_cpp as lib

from ...engine_options import EngineOptions
from ...errors import InvalidArgument
from ...memory import Device, layers_on_devices
from ...model_spec import ModelSpec

_GPU, _IGPU = 1, 2
"""`ggml_backend_dev_type`."""
_REPACKED = b"CPU_REPACK"
_SPLIT_SIZE = int(lib.llama_max_devices())


class Share(msgspec.Struct, frozen=True):
    """The bytes of a model on one device, or on the host (an empty name)."""

    device: str
    weights: int
    context: int
    compute: int


class _Map(ctypes.Structure):
    """libstdc++'s `std::map`: the header of a red-black tree."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("less", "color", "root", "leftmost", "rightmost")),
        ("count", ctypes.c_size_t),
    )


class _Node(ctypes.Structure):
    """A node of the map: from a type of buffer to bytes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("color", "parent", "left", "right", "buffer_type")),
        *((name, ctypes.c_size_t) for name in ("weights", "context", "compute")),
    )


def c_function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of llama.cpp that its Python package does not declare."""
    function = lib._lib[name]
    function.restype, function.argtypes = result, arguments
    return function


_pointer, _pointer_to_size = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
_breakdown = c_function("_Z26llama_get_memory_breakdownPK13llama_context", _Map, _pointer)
_type_name = c_function("ggml_backend_buft_name", ctypes.c_char_p, _pointer)
_is_host = c_function("ggml_backend_buft_is_host", ctypes.c_bool, _pointer)
_device_of = c_function("ggml_backend_buft_get_device", _pointer, _pointer)
_count = c_function("ggml_backend_dev_count", ctypes.c_size_t)
_get = c_function("ggml_backend_dev_get", _pointer, ctypes.c_size_t)
_type = c_function("ggml_backend_dev_type", ctypes.c_int, _pointer)
_name = c_function("ggml_backend_dev_name", ctypes.c_char_p, _pointer)
_memory = c_function("ggml_backend_dev_memory", None, _pointer, _pointer_to_size, _pointer_to_size)


def devices() -> list[Device]:
    """Return the GPUs that llama.cpp would use, in its order.

    Integrated ones are used if there are no others, as in `llama_prepare_model_devices`.
    """
    pointers = [_get(index) for index in range(_count())]
    chosen = [p for p in pointers if _type(p) == _GPU]
    return [_device(p) for p in chosen or [p for p in pointers if _type(p) == _IGPU]]


def _device(pointer: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _memory(pointer, ctypes.byref(free), ctypes.byref(total))
    return Device(_name(pointer).decode(), free.value, total.value)


def breakdown(context: Any) -> list[Share]:
    """Return the memory of a context and its model, allocated or not, per device and on the host.

    The nodes of the C++ map, of 64 bytes each, are not freed.
    """
    found = []
    for node in _walk(_breakdown(context).root):
        device = _device_of(node.buffer_type)
        # Weights repacked for the CPU are not in a host buffer, but their device is the CPU.
        is_gpu = device is not None and _type(device) in (_GPU, _IGPU)
        name = _name(device).decode() if is_gpu and not _is_host(node.buffer_type) else ""
        found.append(Share(name, node.weights, node.context, node.compute))
    return found


def _walk(address: int | None) -> Iterator[Any]:
    if address:
        node = _Node.from_address(address)
        yield from _walk(node.left)
        yield node
        yield from _walk(node.right)


def repacked_bytes(context: Any) -> int:
    """Return the bytes of a context's weights that llama.cpp has laid out anew for the CPU. It does
    so for Q4_0, Q4_K and other types, depending on the CPU.
    """
    nodes = _walk(_breakdown(context).root)
    return sum(node.weights for node in nodes if _type_name(node.buffer_type) == _REPACKED)


def layers_of(spec: ModelSpec, model: Any) -> int:
    """Return how many layers of *model* run on devices; the output layer counts as one."""
    return layers_on_devices(spec, int(lib.llama_model_n_layer(model)) + 1, devices())


def place_layers(spec: ModelSpec, params: Any) -> None:
    """Set the placement of layers in llama.cpp's *params*."""
    params.n_gpu_layers = spec.n_gpu_layers
    if spec.main_gpu >= 0:
        params.main_gpu = spec.main_gpu
        if not spec.tensor_split:
            params.split_mode = lib.LLAMA_SPLIT_MODE_NONE
    if spec.tensor_split:
        params.tensor_split = (ctypes.c_float * _SPLIT_SIZE)(*spec.tensor_split)


class _TensorPlacement(ctypes.Structure):
    """`llama_model_tensor_buft_override`. A pattern of NULL ends a list of them."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


_cpu_buffer_type = c_function("ggml_backend_cpu_buffer_type", _pointer)
_EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"
"""As `LLM_FFN_EXPS_REGEX` in llama.cpp's common/common.h."""
_OF_EXPERTS = re.compile(rf"blk\.(\d+)\.{_EXPERTS}")


def place_experts(options: EngineOptions, name: str, tensors: Iterable[str], params: Any) -> None:
    """Set the placement of the experts of the model *name* in llama.cpp's *params*, which keep it
    alive. With the CPU's buffer type, llama.cpp also chooses those types for which it repacks
    weights, as for every other tensor on the CPU.

    :raises InvalidArgument: *options* place experts, and the layers have none.
    """
    if not options.cpu_moe and not options.n_cpu_moe:
        return
    layers = {int(found[1]) for tensor in tensors if (found := _OF_EXPERTS.match(tensor))}
    chosen = {layer for layer in layers if options.cpu_moe or layer < options.n_cpu_moe}
    if not layers:
        raise InvalidArgument(
            f"{name!r} has no experts that cpu-moe or n-cpu-moe could keep on the CPU",
            hint="leave them out for this model; n-gpu-layers places its layers",
        )
    if not chosen:
        raise InvalidArgument(
            f"the first {options.n_cpu_moe} layers of {name!r} have no experts; layer"
            f" {min(layers)}, counted from 0, is the first one that has",
            hint=f"set n-cpu-moe to more than {min(layers)}, or cpu-moe to true",
        )
    # One pattern for all: llama.cpp compiles each of them again for every tensor.
    numbers = "|".join(map(str, sorted(chosen)))
    pattern = rf"blk\.({numbers})\.{_EXPERTS}".encode()
    placements = (_TensorPlacement * 2)(_TensorPlacement(pattern, _cpu_buffer_type()))
    params.tensor_buft_overrides = ctypes.cast(placements, ctypes.c_void_p)


# GCC before 14 stores only a part of the tiles' configuration (GCC bug 114098). On a CPU with AMX,
# such a build ends its process by SIGSEGV at the first prompt of more than a few tokens.
GCC_MAJOR_MIN = 14
"""The first version of GCC whose AMX code works."""
_COMPILER = re.compile(rb"GCC: \([^)\0]*\) (\d+)\.")
"""An entry of the ELF section `.comment`."""


@cache
def has_broken_amx() -> bool:
    """Return whether llama.cpp was built with AMX by a compiler that breaks it."""
    info = lib.llama_print_system_info().decode(errors="replace")
    if "AMX_INT8 = 1" not in info:
        return False
    try:
        library = Path(lib._lib._name).with_name("libggml-cpu.so").read_bytes()
    except OSError:
        return False
    return is_by_old_gcc(library)


def is_by_old_gcc(library: bytes) -> bool:
    """Return whether a version of GCC that breaks AMX compiled a part of *library*."""
    return any(int(major) < GCC_MAJOR_MIN for major in _COMPILER.findall(library))
