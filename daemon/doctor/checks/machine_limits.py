"""The machine: its memory, process limits, cores and users, and engine options that exceed them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ....backends.engine_options import (
    ENGINE_OPTIONS,
    cache_share,
    engine_options_of,
    read_engine_options,
)
from ....backends.errors import InvalidArgument
from ...config.model_settings import ModelConfig
from ...config.settings import Config
from ...printable import size_text
from ...residency.machine import MachineMemory, cores_usable
from ...users import Users
from ..finding import Finding, fail, ok, warn
from .folders import Models

STALLED_PERCENT = 10.0
"""Memory is short if programs waited for it in at least this share of the last minute."""
OTHER_FILES = 128
"""Open files other than connections: of models, workers, the journal, a scrape."""


class Machine(msgspec.Struct, frozen=True):
    """Resources of a daemon; the limits are those of the running daemon if they can be read."""

    free_bytes: int
    total_bytes: int
    """The machine's memory, or the limit of the cgroups."""
    memory_bytes: int
    """The machine's memory."""
    swapped_bytes: int
    stalled_percent: float | None
    """None if the kernel does not report it (PSI)."""
    files_max: int
    locked_max: int
    """Bytes of memory that a process may lock; -1 if there is no limit."""
    cores: int
    cores_usable: int
    load: float
    has_distinct_users: bool
    """Whether each user has a distinct uid."""


def inspect_machine(
    pid: int = 0, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> Machine:
    """Return the machine's resources; *pid* is that of the running daemon, or 0."""
    memory, meminfo = MachineMemory(proc, cgroups), _meminfo(proc)
    return Machine(
        free_bytes=memory.free_bytes(),
        total_bytes=memory.total_bytes(),
        memory_bytes=meminfo["MemTotal"],
        swapped_bytes=meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0),
        stalled_percent=_stalled(proc),
        files_max=_limit("Max open files", proc, pid),
        locked_max=_limit("Max locked memory", proc, pid, soft=True),
        cores=os.cpu_count() or 1,
        cores_usable=cores_usable(proc, cgroups),
        load=os.getloadavg()[0],
        has_distinct_users=Users(proc=proc).are_distinct,
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


def _limit(name: str, proc: Path, pid: int, *, soft: bool = False) -> int:
    """Return a limit of the daemon, or of this process if the daemon's is unknown; -1 if there is
    no limit, 0 if none can be read.

    It is the hard limit, since the daemon raises its limit of open files to that. With *soft*, it
    is the limit in force.
    """
    for process in (str(pid), "self"):
        try:
            # The pid of a process in another container may belong to another process here.
            is_inferd = process == "self" or "inferd" in (proc / process / "cmdline").read_text()
            text = (proc / process / "limits").read_text() if is_inferd else ""
        except OSError:
            continue
        if found := re.search(rf"^{name}\s+(\w+)\s+(\w+)", text, re.MULTILINE):
            limit = found[1 if soft else 2]
            return int(limit) if limit.isdigit() else -1
    return 0


def check_memory(
    machine: Machine, models: Models | None, config: Config | None, loaded: Collection[str] = ()
) -> Iterator[Finding]:
    """Check that the smallest model fits in memory, unless models are *loaded* already."""
    free = size_text(machine.free_bytes)
    smallest = models.smallest if models is not None and not loaded else None
    if machine.stalled_percent is not None and machine.stalled_percent >= STALLED_PERCENT:
        yield warn(
            f"programs waited for memory in {machine.stalled_percent:.0f} % of the last minute",
            "end other programs, or lower memory-bytes",
        )
    if config is not None and config.memory_bytes > machine.total_bytes:
        yield warn(
            f"memory-bytes is {size_text(config.memory_bytes)}, but the machine has only"
            f" {size_text(machine.total_bytes)}",
            "lower it, or leave it out to use the free memory",
        )
    if models is not None and smallest is not None and smallest[1] > machine.free_bytes:
        yield fail(
            f"{free} are free for models, but the smallest model file, {smallest[0]}, has"
            f" {size_text(smallest[1])}",
            f"end other programs, or get a smaller model: `{models.pull}`",
        )
        return
    limited = machine.total_bytes < machine.memory_bytes
    limit = f", of {size_text(machine.total_bytes)} in the limit of its cgroup" if limited else ""
    swapped = f"; {size_text(machine.swapped_bytes)} swapped out" if machine.swapped_bytes else ""
    yield ok(f"{free} are free for models{limit}{swapped}")


def check_limits(machine: Machine, config: Config | None) -> Iterator[Finding]:
    """Check the limit of open files, and whether the kernel reports memory stalls."""
    needed = (config.connections_max if config is not None else 0) + OTHER_FILES
    if machine.files_max and machine.files_max < needed:
        yield fail(
            f"{machine.files_max} files may be open at once, but {needed} are needed for"
            " connections-max and the daemon's own files",
            "raise the limit (`ulimit -n`, LimitNOFILE= in the unit), or lower connections-max",
        )
    if machine.stalled_percent is None:
        yield warn(
            "the kernel does not report stalls (PSI), so memory is only checked every 5 s",
            "boot with psi=1; in a container, allow it to read /proc/pressure",
        )
    elif machine.files_max >= needed:
        yield ok(f"{machine.files_max} open files; stalls are reported (PSI)")


def check_cores(machine: Machine, config: Config | None) -> Iterator[Finding]:
    """Check that `cores` is at most the number of usable cores."""
    configured = config.cores if config is not None else machine.cores_usable
    if configured > machine.cores_usable:
        yield warn(
            f"cores is {configured}, but a process may use {machine.cores_usable}: threads"
            " then wait for each other",
            "lower `cores`, or leave it out",
        )
    else:
        yield ok(f"{configured} of the machine's {machine.cores} cores; load {machine.load:.1f}")


def check_users(machine: Machine) -> Iterator[Finding]:
    """Check that the kernel distinguishes users."""
    if machine.has_distinct_users:
        yield ok("each user has a distinct uid")
    else:
        yield warn(
            "this is a user namespace, where many users share one uid: a daemon here serves only"
            " its own user",
            "run it outside; do not set PrivateUsers= in its unit",
        )


# Options of the configured models.


def check_engine_options(config: Config | None, machine: Machine | None) -> Iterator[Finding]:
    """Check the options of each model that sets some."""
    for name, model in (config.models if config is not None else {}).items():
        assert config is not None
        options = engine_options_of(config.defaults | model.options)
        changed = {key: value for key, value in options.items() if value != ENGINE_OPTIONS[key]}
        if changed and model.backend == "llama":
            yield from _check_model(name, model, changed, machine)


def _check_model(
    name: str, model: ModelConfig, options: dict[str, Any], machine: Machine | None
) -> Iterator[Finding]:
    try:
        read_engine_options(options)
    except InvalidArgument as exc:
        yield fail(f"{name}: {exc.message}", exc.hint)
        return
    size, limit = _file_bytes(model), -1 if machine is None else machine.locked_max
    if options.get("mlock") and 0 <= limit < size:
        yield warn(
            f"{name}: mlock needs to lock {size_text(size)}, but a process may lock only"
            f" {size_text(limit)}, so the rest can be swapped out",
            "raise the limit (`ulimit -l`, LimitMEMLOCK=infinity in the unit), or leave mlock out",
        )
    else:
        yield ok(f"{name}: {', '.join(_effects(options, size))}")


def _effects(options: dict[str, Any], size: int) -> Iterator[str]:
    """Yield each option with its cost or saving, as far as it is known without the engine."""
    share = cache_share(options)
    for key, value in options.items():
        if key not in ("cache-type-k", "cache-type-v"):
            text = " ".join(map(str, value)) if isinstance(value, list) else value
            yield f"{key} {text}{_EFFECTS.get(key, '').format(size=size_text(size))}"
    if share != 1:
        types = [options.get(f"cache-type-{part}", "f16") for part in ("k", "v")]
        verb = "save" if share < 1 else "cost"
        yield f"KV states in {types[0]} and {types[1]} {verb} {abs(1 - share):.0%} of those in f16"


_EFFECTS = {
    "swa-full": " (layers with a window keep the KV states of the whole context)",
    "mlock": " ({size} are never swapped out)",
    "mmap": " ({size} are read at each load, and other programs cannot share them)",
}
"""The effect of an option on memory, by its name."""


def _file_bytes(model: ModelConfig) -> int:
    try:
        return os.stat(model.file).st_size if model.file is not None else 0
    except OSError:
        return 0
