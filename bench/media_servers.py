"""The servers of the scenarios with images: one model with two projectors, on both sides.

The projectors have random weights and the shape of real ones, of about 100 M parameters. One makes
causal images, the other images of gemma3, whose entries see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

from tests.tiny_projector import REALISTIC, write_realistic
from tools.build_engine import ROOT
from tools.get_models import MODELS_DIR, SOURCES

from . import daemon, llama_server
from .clients import Client

__all__ = (
    "CASES",
    "CAUSAL",
    "MODEL",
    "NON_CAUSAL",
    "Connect",
    "start_daemon",
    "start_reference",
    "write_projectors",
)

Connect = Callable[[int], AbstractAsyncContextManager[Client]]
"""Connects a program to a server; llama-server serves it in the slot of this number."""
MODEL = MODELS_DIR / SOURCES["gemma3"].file
PROJECTORS_DIR = ROOT / ".cache" / "projectors"
CAUSAL, NON_CAUSAL = CASES = 1, 2
PROJECTORS = {CAUSAL: "mlp", NON_CAUSAL: "gemma3"}
"""The kind of each case's projector, which is also the model's name in the daemon."""
PATCH = 16
"""The side of a patch in pixels: an image has 1024, whose encoding takes seconds on two cores."""


def write_projectors() -> dict[int, Path]:
    """Write the projectors, unless they exist, and return them by case."""
    PROJECTORS_DIR.mkdir(parents=True, exist_ok=True)
    return {
        case: write_realistic(kind, PROJECTORS_DIR, size=REALISTIC[kind]._replace(patch=PATCH))
        for case, kind in PROJECTORS.items()
    }


async def start_reference(
    stack: AsyncExitStack, projector: Path, slots: int, ctx_size: int
) -> Connect:
    """Start llama-server with a projector and its default caches."""
    flags = ("--mmproj", str(projector))
    running = llama_server.running(slots, ctx_size, flags, MODEL)
    return (await stack.enter_async_context(running)).client


async def start_daemon(
    stack: AsyncExitStack, projectors: Mapping[int, Path], slots: int, ctx_size: int
) -> dict[int, Connect]:
    """Start a daemon that keeps the model loaded with each of *projectors*; return its clients by
    case.
    """
    text = daemon.configuration(slots, ctx_size)
    for case, projector in projectors.items():
        text += f'\n[models.{PROJECTORS[case]}]\nfile = "{MODEL}"\nmmproj = "{projector}"\n'
        text += 'speculation = "off"\n'
    server = await stack.enter_async_context(daemon.running(text))
    for case in projectors:
        await server.keep_loaded(stack, PROJECTORS[case])
    return {case: _connect(server, PROJECTORS[case]) for case in projectors}


def _connect(server: daemon.Inferd, model: str) -> Connect:
    def connect(slot: int) -> AbstractAsyncContextManager[Client]:
        return server.client(slot, model=model)

    return connect
