"""The report of `inferd doctor`: what a bug report needs, and nothing that users wrote.

Everything that goes into it is named here, and in `log` what it has of the log: no prompt, no
answer, no session's id; of texts among models' parameters only their length.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ... import __version__
from ...backends.engine_build import LLAMA_COMMIT
from ...backends.errors import InvalidArgument, PermissionDenied
from ...backends.params import BY_NAME
from ..config.show import InForce, Value, toml_of
from .examination import Examination, Facts
from .finding import Finding
from .report_log import look_at_log
from .time_limits import Look, Unseen

FIGURES = (
    "uptime_s", "draining", "socket_activated", "connections", "sessions", "sessions_max",
    "sessions_dormant", "sessions_expired", "waiting", "running", "parked", "refused", "recovered",
    "cores", "memory", "journal", "parts", "metrics", "restart_for",
)  # fmt: skip
"""Of the daemon's `stats`."""


def text_of(findings: Iterable[Finding]) -> str:
    """Return findings for people: what was found, and below it what to do."""
    lines: list[str] = []
    for finding in findings:
        first, *others = finding.found.splitlines() or [""]
        lines.append(f"{finding.status:<4}  {finding.check:<13}  {first}")
        lines += [f"{'':21}{line}" for line in others]
        if finding.remedy:
            lines.append(f"{'':21}→ {finding.remedy}")
    return "\n".join(lines)


def report(asked: Examination, now: datetime.datetime) -> str:
    """Return the report's text."""
    parts = {
        "findings": text_of(asked.findings),
        "versions": "\n".join(_versions(asked.facts)),
        "configuration": _configuration(asked.facts),
        "daemon": _daemon(asked.facts),
        "log": _log(asked.facts),
    }
    head = f"# inferd doctor, {now.isoformat(timespec='seconds')}\n"
    return head + "".join(f"\n## {name}\n\n{text}\n" for name, text in parts.items())


def _versions(seen: Facts) -> Iterator[str]:
    yield f"inferd {__version__}, llama.cpp {LLAMA_COMMIT}"
    yield f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    packages = seen.installed.packages if seen.installed is not None else {}
    yield ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())
    if seen.engine is not None:
        yield f"engine: {' '.join(seen.engine.system_info.split()) or seen.engine.ended}"
        yield f"devices: {', '.join(d.name for d in seen.engine.devices) or 'none'}"


def _configuration(seen: Facts) -> str:
    if seen.settings is None or seen.settings.shown is None:
        return "none that can be read"
    return toml_of(without_texts(seen.settings.shown), origins=True).rstrip()


def without_texts(shown: InForce) -> InForce:
    """Return what is in force, with the length alone of what may be a user's text."""
    return msgspec.structs.replace(
        shown,
        defaults=_lengths(shown.defaults),
        models={name: _lengths(values) for name, values in shown.models.items()},
    )


def _lengths(values: Mapping[str, Value]) -> dict[str, Value]:
    return {name: Value(_length(name, v.value), v.origin) for name, v in values.items()}


def _length(name: str, value: Any) -> Any:
    parameter = BY_NAME.get(name)
    is_text = isinstance(value, str | list | dict) and value
    if parameter is None or parameter.choices or not is_text:
        return value
    return f"({len(value)} {'characters' if isinstance(value, str) else 'items'})"


def _daemon(seen: Facts) -> str:
    stats = seen.reach.stats if seen.reach is not None else {}
    told = {name: stats[name] for name in FIGURES if name in stats}
    return msgspec.json.format(msgspec.json.encode(told), indent=1).decode()


def _log(seen: Facts) -> str:
    stats = seen.reach.stats if seen.reach is not None else {}
    config = seen.settings.config if seen.settings is not None else None
    try:
        end = Look(partial(look_at_log, stats, config, seen.units)).facts()
    except Unseen as exc:
        return f"cannot be looked at: {exc}"
    if not end.place:
        return "on the daemon's standard error, which nobody keeps"
    other = f"; {end.other} lines that are no events are left out" if end.other else ""
    head = f"{end.place}: the last {len(end.lines)} warnings and errors{other}"
    return "\n".join([head, *end.lines])


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet, for its owner alone.

    :raises InvalidArgument: it is there, or cannot be.
    :raises PermissionDenied: the caller may not write there.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise InvalidArgument(
            f"{path} is there already", hint="nothing is overwritten: name another file"
        ) from None
    except PermissionError:
        raise PermissionDenied(
            f"{path} may not be written", hint="name a file in a folder of your own"
        ) from None
    except OSError as exc:
        raise _unwritten(path, exc) from None
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as exc:
        path.unlink(missing_ok=True)  # half a report would look like a whole one
        raise _unwritten(path, exc) from None


def _unwritten(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"{path} cannot be written: {error.strerror}", hint="name another file")
