"""The machine: its memory, what limits a process of it, its cores, its users."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from ...config.settings import Config
from ...residency.cgroups import cores_usable
from ...residency.machine import MachineMemory
from ...residency.sizes import size_text
from ...users import Users
from ..finding import Finding, fail, ok, warn
from .folders import Models

STALLED_PERCENT = 10.0
"""From this share of the last minute on, in which some program waited for memory, it is short."""
FILES_BESIDE = 128
"""Open files beside connections: of models, workers, the journal, a scrape."""


class Machine(msgspec.Struct, frozen=True):
    """What there is for a daemon; of one that runs, and may be looked at, its own limits."""

    free_bytes: int
    total_bytes: int
    """The machine's, or what its cgroups leave of them."""
    memory_bytes: int
    """The machine's."""
    swapped_bytes: int
    stalled_percent: float | None
    """None: the kernel does not tell."""
    files_max: int
    cores: int
    cores_usable: int
    load: float
    told_apart: bool
    """Whether every user has a number of his own."""


def look_at_machine(
    pid: int = 0, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> Machine:
    """Look at the machine; *pid* is the daemon's, where it runs."""
    memory, meminfo = MachineMemory(proc, cgroups), _meminfo(proc)
    return Machine(
        free_bytes=memory.free_bytes(),
        total_bytes=memory.total_bytes(),
        memory_bytes=meminfo["MemTotal"],
        swapped_bytes=meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0),
        stalled_percent=_stalled(proc),
        files_max=_files_max(proc, pid),
        cores=os.cpu_count() or 1,
        cores_usable=cores_usable(proc, cgroups),
        load=os.getloadavg()[0],
        told_apart=Users(proc=proc).told_apart,
    )


def _meminfo(proc: Path) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    return {name: int(value) * 1024 for name, value in found}


def _stalled(proc: Path) -> float | None:
    try:
        text = (proc / "pressure" / "memory").read_text()
    except OSError:
        return None
    found = re.search(r"^some .*\bavg60=([\d.]+)", text, re.MULTILINE)
    return float(found[1]) if found else None


def _files_max(proc: Path, pid: int) -> int:
    """Return the bound on open files of the daemon, or, where that is not told, of this process."""
    for whose in (str(pid), "self"):
        try:
            # A number of another container's is somebody else here.
            ours = whose == "self" or "inferd" in (proc / whose / "cmdline").read_text()
            text = (proc / whose / "limits").read_text() if ours else ""
        except OSError:
            continue
        if found := re.search(r"^Max open files\s+(\d+)", text, re.MULTILINE):
            return int(found[1])
    return 0


def check_memory(
    machine: Machine, models: Models | None, config: Config | None, loaded: Collection[str] = ()
) -> Iterator[Finding]:
    """Check that a model has room; where some are *loaded* it had."""
    free = size_text(machine.free_bytes)
    smallest = models.smallest if models is not None and not loaded else None
    if machine.stalled_percent is not None and machine.stalled_percent >= STALLED_PERCENT:
        yield warn(
            "memory",
            f"programs waited for memory in {machine.stalled_percent:.0f} % of the last minute",
            "end what takes it, or let the daemon have less by memory-bytes",
        )
    if config is not None and config.memory_bytes > machine.total_bytes:
        yield warn(
            "memory",
            f"memory-bytes is {size_text(config.memory_bytes)}, and there are"
            f" {size_text(machine.total_bytes)}",
            "lower it, or leave it out: then models get what is free",
        )
    if smallest is not None and smallest[1] > machine.free_bytes:
        yield fail(
            "memory",
            f"{free} are free for models, and the smallest, {smallest[0]}, has"
            f" {size_text(smallest[1])}",
            "end what takes the memory, or get a smaller model: `inferd pull smollm2`",
        )
        return
    limited = machine.total_bytes < machine.memory_bytes
    limit = f", of {size_text(machine.total_bytes)} that its cgroup may have" if limited else ""
    swapped = f"; {size_text(machine.swapped_bytes)} swapped out" if machine.swapped_bytes else ""
    yield ok("memory", f"{free} are free for models{limit}{swapped}")


def check_limits(machine: Machine, config: Config | None) -> Iterator[Finding]:
    """Check what a process may have open, and whether the kernel tells of stalls."""
    needed = (config.connections_max if config is not None else 0) + FILES_BESIDE
    if machine.files_max and machine.files_max < needed:
        yield fail(
            "limits",
            f"{machine.files_max} files may be open at once, and connections-max needs {needed}",
            "raise it (`ulimit -n`, LimitNOFILE= in the unit), or lower connections-max",
        )
    if machine.stalled_percent is None:
        yield warn(
            "limits",
            "the kernel tells no stalls (PSI): memory that falls short is seen every 5 s only",
            "boot with psi=1; in a container let it read /proc/pressure",
        )
    elif machine.files_max >= needed:
        yield ok("limits", f"{machine.files_max} open files; stalls are told (PSI)")


def check_cores(machine: Machine, config: Config | None) -> Iterator[Finding]:
    """Check how many cores there are to compute on."""
    configured = config.cores if config is not None else machine.cores_usable
    if configured > machine.cores_usable:
        yield warn(
            "cores",
            f"cores is {configured}, and a process may use {machine.cores_usable}: threads that"
            " wait for each other stand still",
            "lower `cores`, or leave it out",
        )
    else:
        yield ok(
            "cores",
            f"{configured} of the machine's {machine.cores}; load {machine.load:.1f}",
        )


def check_users(machine: Machine) -> Iterator[Finding]:
    """Check that users can be told apart."""
    if machine.told_apart:
        yield ok("users", "the kernel tells all users apart")
    else:
        yield warn(
            "users",
            "this is a user namespace, where many users share one number: a daemon here serves none"
            " but its own user",
            "run it outside; in its unit PrivateUsers= stays off",
        )
