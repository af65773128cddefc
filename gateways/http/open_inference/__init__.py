"""The Open Inference Protocol (KServe v2, Triton) for graphs."""

from __future__ import annotations

from .api import OPEN_INFERENCE

__all__ = ("OPEN_INFERENCE",)
