"""The memory and devices that the echo model's options claim."""

from __future__ import annotations

from itertools import accumulate, pairwise

import msgspec

from ..memory.memory_need import Device, MemoryNeed, check_devices, layers_on_devices
from ..model_spec import ModelSpec, Shape
from .options import ECHO_CTX_SIZE, EchoOptions


class EchoMemoryEstimator:
    """The echo model's `MemoryEstimator`; it returns the numbers of the options."""

    def __init__(self, spec: ModelSpec):
        self._options = msgspec.convert(spec.options, EchoOptions)
        layers = layers_on_devices(spec, self._options.layers, self._options.device_bytes)
        ctx_size = spec.ctx_size or ECHO_CTX_SIZE
        self.shape = Shape(spec.slots, ctx_size, spec.batch_size, layers)
        self._split = spec.tensor_split or self._options.device_bytes
        self._main = spec.main_gpu
        check_devices(spec, self.devices)

    @property
    def devices(self) -> list[Device]:
        """The options' devices, whose memory is always free."""
        return [Device(f"echo{i}", size, size) for i, size in enumerate(self._options.device_bytes)]

    def need(self, shape: Shape) -> MemoryNeed:
        """Return the memory that the options claim for *shape*."""
        tokens, on_devices = shape.slots * shape.ctx_size, shape.n_gpu_layers
        layer_bytes = max(0, self._options.layer_bytes)
        on_host = (self._options.layers - on_devices) * layer_bytes
        return MemoryNeed(
            weights=max(0, self._options.weight_bytes) + on_host,
            context=max(0, self._options.token_bytes) * tokens,
            devices=self._spread(on_devices, layer_bytes) if on_devices else {},
            embedding=max(0, self._options.embedding_bytes),
            measuring=max(0, self._options.probe_bytes),
        )

    def _spread(self, layers: int, layer_bytes: int) -> dict[str, int]:
        """Return the bytes of *layers* on each device, in the split's proportions."""
        if self._main >= 0:
            return {f"echo{self._main}": layers * layer_bytes}
        total = sum(self._split)
        ends = [round(layers * end / total) for end in accumulate(self._split)]
        return {
            f"echo{i}": (end - begin) * layer_bytes
            for i, (begin, end) in enumerate(pairwise((0, *ends)))
        }

    def close(self) -> None:
        """Free nothing."""
