"""The parts of a scenario: sides that do the same work, and the figures computed from it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from bench import daemon, gateway, llama_server, texts
from bench.clients import Server
from bench.runs import Figure, Target
from bench.streams import Stream
from inferd.backends.tuning_choice import TuningRecord
from inferd.daemon.models.tuning_records import read_records
from inferd.daemon.state_files import TUNING_FILE

INFERD = "inferd"
GATEWAY = "gateway"
"""inferd over HTTP."""
IDLE_S_MAX = 180
"""The idle time that `measure_setting` gives a daemon."""
GATEWAY_LOSS_MAX = 0.05
"""The part by which a figure may be worse over HTTP than over inferd's own protocol."""
LLAMA_SERVER = "llama-server"


@dataclass(frozen=True)
class Work:
    """The work of one run of a side.

    *serial* is new for each run and stands at the front of the prompts. The rest of the prompts is
    the same for all sides of a round. So no server has any part of a prompt in a cache, even where
    sides share a daemon or a disturbed run is repeated.
    """

    case: int
    round: int
    serial: int
    small: bool = False
    """Whether the run is only a warm-up, or a check that the side works."""

    @property
    def mark(self) -> str:
        """The front of each prompt."""
        return texts.mark(self.serial)

    def rng(self) -> random.Random:
        """Return the random generator of the round's texts."""
        return random.Random(self.round * 1000 + self.case)


Side = Callable[[Work], Awaitable[list[Stream]]]
"""Does the work and returns its streams."""


@dataclass(frozen=True)
class Started:
    """A scenario's sides, and facts measured while they started."""

    sides: dict[str, Side]
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Scenario:
    """A scenario; `start` starts the servers, which run until the stack closes.

    `pictures` names the sides that get a timeline, for the case `picture_case`. The timeline shows
    the run with the side's median of the first figure.
    """

    name: str
    title: str
    about: str
    figures: tuple[Figure, ...]
    targets: tuple[Target, ...]
    start: Callable[[AsyncExitStack], Awaitable[Started]]
    measure: Callable[[Sequence[Stream]], dict[str, float]]
    """Checks a run's streams and returns its figures."""
    cases: tuple[int, ...] = (0,)
    case_heading: str = ""
    pictures: tuple[str, ...] = (LLAMA_SERVER, INFERD)
    picture_case: int = 0


def side_of(drive: Callable[[Server, Work], Awaitable[list[Stream]]], server: Server) -> Side:
    """Return the side that drives *server*."""

    async def side(work: Work) -> list[Stream]:
        return await drive(server, work)

    return side


async def start_pair(
    stack: AsyncExitStack,
    drive: Callable[[Server, Work], Awaitable[list[Stream]]],
    slots: int,
    ctx_size: int,
) -> Started:
    """Start llama-server with its default caches, a daemon, and a gateway before it."""
    reference = await stack.enter_async_context(llama_server.running(slots, ctx_size))
    server = await start_inferd(stack, slots, ctx_size)
    http = await stack.enter_async_context(gateway.running(server))
    servers: dict[str, Server] = {LLAMA_SERVER: reference, INFERD: server, GATEWAY: http}
    return Started({name: side_of(drive, each) for name, each in servers.items()}, {})


def as_slow_as_inferd(figure: str, case: int = 0) -> Target:
    """Return the target that a time is as short over HTTP as over inferd's own protocol."""
    return Target(figure, GATEWAY, INFERD, most=1 + GATEWAY_LOSS_MAX, case=case)


async def start_inferd(
    stack: AsyncExitStack,
    slots: int,
    ctx_size: int,
    settings: Mapping[str, Any] | None = None,
    records: Path | None = None,
) -> daemon.Inferd:
    """Start a daemon that keeps the model loaded, with measured settings from the file *records* or
    else those of `own_setting`.
    """
    text = daemon.configuration(slots, ctx_size, settings)
    server = await stack.enter_async_context(daemon.running(text, records=records))
    await server.keep_loaded(stack)
    return server


async def measure_setting(
    text: str, home: Path, model: str, use: Callable[[daemon.Inferd], Awaitable[object]]
) -> Path | None:
    """Use a daemon without records, with its state in *home*, and wait while it is idle and
    measures which setting is fastest for such steps. Return the file with the result, if any.
    """
    records = home / TUNING_FILE
    async with AsyncExitStack() as stack:
        text = text.replace("tuning = false", "tuning = true")
        server = await stack.enter_async_context(daemon.running(text, home, home / "none"))
        await server.keep_loaded(stack, model)
        await use(server)
        await wait_for(records)
    return records if records.exists() else None


async def wait_for(records: Path) -> None:
    """Wait for up to `IDLE_S_MAX` until a daemon has written the file with its measured setting."""
    for _ in range(IDLE_S_MAX):
        if await anyio.Path(records).exists():
            return
        await anyio.sleep(1)


def setting_text(record: TuningRecord) -> str:
    """Return a measured setting, with the reason."""
    attention = "on" if record.chosen.flash_attn else "off"
    threads = f", {record.chosen.threads} threads" if record.chosen.threads else ""
    return f"flash attention {attention}{threads}; {record.reason}"


def measured_text(records: Path | None) -> str:
    """Return the setting in a file that `measure_setting` returned."""
    if records is None:
        return f"the rule for this kind of CPU; {IDLE_S_MAX} idle seconds were too short"
    return setting_text(read_records(records)[0])
