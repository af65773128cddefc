"""Guests of other runtimes: their graphs and contexts by handles, on contexts of the daemon.

A `Guest` makes the calls of wasi-nn for one guest. It is asynchronous, except in `gateways/wasm`,
where its calls block the guest's thread.
"""

from __future__ import annotations

from .guest import CONTEXTS_MAX, TARGETS, Guest
from .images import ImageDirectory, is_image, read_image
from .preloads import Preload, parse_preload
from .remote import DaemonLink, Remote, guest_timeout

__all__ = (
    "CONTEXTS_MAX",
    "TARGETS",
    "DaemonLink",
    "Guest",
    "ImageDirectory",
    "Preload",
    "Remote",
    "guest_timeout",
    "is_image",
    "parse_preload",
    "read_image",
)
