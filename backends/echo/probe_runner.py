"""Probes whose times the options of the echo model state."""

from __future__ import annotations

import threading

from ..probes import PROBES, Probe, Setting
from .options import EchoOptions


class EchoProbeRunner:
    """The echo model's `ProbeRunner`. Its samples are exactly the times of the options."""

    def __init__(self, options: EchoOptions, slots: int):
        self.probes = tuple(p for p in PROBES if p.sequences <= slots)
        self._options = options
        self._aborted = threading.Event()
        self._prepared: set[tuple[Probe, Setting]] = set()

    def advance(self, probe: Probe, setting: Setting) -> float | None:
        """Prepare a probe at its first call, and wait for its time at the others."""
        self._aborted.clear()
        if (probe, setting) not in self._prepared:
            self._prepared.add((probe, setting))
            return None
        share = self._options.probe_share if setting.flash_attn else 1.0
        seconds = self._options.probe_ms * share / 1000
        if self._aborted.wait(seconds):
            return None
        return seconds

    def abort(self) -> None:
        """End the present wait."""
        self._aborted.set()

    def close(self) -> None:
        """Free nothing."""
