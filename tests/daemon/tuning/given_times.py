"""A model whose steps take given times of a fake clock."""

from __future__ import annotations

from collections.abc import Callable

from inferd.backends.llama.measuring.requests import KvLoss, Opened, Variant
from inferd.backends.tuning_choice import PROBES, ModelShape, Probe

__all__ = ("SHAPE", "GivenTimes", "opened")

SHAPE = ModelShape(
    architecture="llama", layers=3, embedding=64, heads=4, kv_heads=2, head_k=16, head_v=16,
    size_bytes=1000,
)  # fmt: skip


def opened(ctx_size: int = 2048) -> Opened:
    """Return a model that runs all probes which a real one runs."""
    probes = [p for p in PROBES if not (p.depth and p.sequences > 1)]
    return Opened(SHAPE, probes, ["f16", "q8_0", "q4_0"], ctx_size)


class GivenTimes:
    """A `Runner` whose steps take 10 ms, times the factor of the variant."""

    def __init__(self, factor: Callable[[Probe, Variant], float], losses_s: float = 1.0):
        self.now = 100.0
        self.runs: list[tuple[Probe, Variant]] = []
        self.compared: list[Variant] = []
        self._factor, self._losses_s = factor, losses_s

    def clock(self) -> float:
        return self.now

    def run_probe(self, probe: Probe, variant: Variant, until: float) -> float | None:
        seconds = 0.01 * self._factor(probe, variant)
        if self.now + seconds > until:
            self.now = until
            return None
        self.now += seconds
        self.runs.append((probe, variant))
        return seconds

    def measure_losses(self, variants: list[Variant], until: float) -> list[KvLoss]:
        self.compared = variants
        if self.now + self._losses_s > until:
            self.now = until
            return []
        self.now += self._losses_s
        return [KvLoss(0.1 * n, 0.01, 0.02 * n, 512) for n in range(len(variants))]

    def close_contexts(self) -> None:
        pass
