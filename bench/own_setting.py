"""The setting that inferd chooses by itself on this machine, with which all its sides run.

A daemon with a fresh state is used for two minutes, in which it measures its settings while it is
idle, and is then left idle until it has done so. The daemons of the scenarios begin with a copy of
its records.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from inferd.backends.library import LLAMA_COMMIT
from inferd.backends.tuning_choice import TuningRecord, choose_by_cpu, this_cpu
from inferd.daemon.models.tuning_records import TuningRecords

from . import daemon
from .machine import THREADS
from .scenarios import decode
from .scenarios.base import Work, setting_text, wait_for

USE_S = 120.0
PAUSE_S = 6.0
"""Between two uses, which take 1 to 9 s. A daemon measures after 2 s without work."""
_CPU = this_cpu(THREADS)


async def measure() -> str:
    """Use a daemon with a fresh state for `USE_S`, and keep its records for other daemons. Return
    the setting that they name, with the reason.
    """
    daemon.TUNING_RECORDS.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="inferd-bench-") as folder:
        async with AsyncExitStack() as stack:
            text = daemon.configuration(decode.SLOTS, decode.CTX_SIZE, {"tuning": True})
            server = await stack.enter_async_context(daemon.running(text, Path(folder)))
            await server.keep_loaded(stack)
            await _use(server)
            records = Path(folder) / daemon.TUNING_RECORDS.name
            await wait_for(records)
        if records.exists():
            daemon.TUNING_RECORDS.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(records, daemon.TUNING_RECORDS)
    return in_force()


async def _use(server: daemon.Inferd) -> None:
    """Stream to 1, 4 and 16 clients in turn, with pauses, for `USE_S`."""
    end_s, number = time.monotonic() + USE_S, 0
    while time.monotonic() < end_s:
        work = Work(decode.CASES[number % len(decode.CASES)], number, number)
        await decode.drive_inferd(server, daemon.StreamClient, work)
        await asyncio.sleep(PAUSE_S)
        number += 1


def in_force() -> str:
    """Return the setting of the kept records, with the reason."""
    for record in _kept():
        return setting_text(record)
    return "the rule for this kind of CPU; it was not idle enough for a measurement"


def has_flash_attn() -> bool:
    """Return whether a daemon with the kept records computes with flash attention."""
    records = _kept()
    return (records[0].chosen if records else choose_by_cpu(_CPU).setting).flash_attn


def _kept() -> Sequence[TuningRecord]:
    return TuningRecords(daemon.TUNING_RECORDS.parent).of_machine(_CPU.key, LLAMA_COMMIT)
