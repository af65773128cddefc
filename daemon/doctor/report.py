"""The report of `inferd doctor`: data for a bug report, without any text of users.

This module and `report_log` list all that goes into it. It has no prompt, no answer and no session
id, and of texts among the models' parameters only the length.
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
from ...backends.errors import InvalidArgument, PermissionDenied
from ...backends.library.engine_build import LLAMA_COMMIT
from ...backends.params import BY_NAME
from ..config.show import InForce, Value, toml_of
from .examination import Examination, Facts
from .finding import Finding
from .report_log import read_log_end
from .time_limits import Probe, ProbeFailed

STATS_KEYS = (
    "uptime_s", "draining", "socket_activated", "connections", "sessions", "sessions_max",
    "sessions_dormant", "sessions_expired", "waiting", "running", "parked", "refused", "recovered",
    "cores", "memory", "journal", "components", "metrics", "pending_restart",
)  # fmt: skip
"""Keys of the daemon's `stats` that go into the report."""


def text_of(findings: Iterable[Finding]) -> str:
    """Return findings as text, each with its remedy below."""
    lines: list[str] = []
    for finding in findings:
        first, *others = finding.found.splitlines() or [""]
        lines.append(f"{finding.status:<4}  {finding.check:<13}  {first}")
        lines += [f"{'':21}{line}" for line in others]
        if finding.remedy:
            lines.append(f"{'':21}→ {finding.remedy}")
    return "\n".join(lines)


def report(examination: Examination, now: datetime.datetime) -> str:
    """Return the report's text."""
    parts = {
        "findings": text_of(examination.findings),
        "versions": "\n".join(_versions(examination.facts)),
        "configuration": _configuration(examination.facts),
        "daemon": _daemon(examination.facts),
        "log": _log(examination.facts),
    }
    head = f"# inferd doctor, {now.isoformat(timespec='seconds')}\n"
    return head + "".join(f"\n## {name}\n\n{text}\n" for name, text in parts.items())


def _versions(facts: Facts) -> Iterator[str]:
    yield f"inferd {__version__}, llama.cpp {LLAMA_COMMIT}"
    yield f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    packages = facts.installed.packages if facts.installed is not None else {}
    yield ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())
    if facts.engine is not None:
        yield f"engine: {' '.join(facts.engine.system_info.split()) or facts.engine.failure}"
        yield f"devices: {', '.join(d.name for d in facts.engine.devices) or 'none'}"


def _configuration(facts: Facts) -> str:
    if facts.settings is None or facts.settings.shown is None:
        return "none that is valid"
    return toml_of(without_texts(facts.settings.shown), origins=True).rstrip()


def without_texts(shown: InForce) -> InForce:
    """Return the values in force, with the length instead of texts that users may have written."""
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


def _daemon(facts: Facts) -> str:
    selected = {name: facts.stats[name] for name in STATS_KEYS if name in facts.stats}
    return msgspec.json.format(msgspec.json.encode(selected), indent=1).decode()


def _log(facts: Facts) -> str:
    try:
        end = Probe(partial(read_log_end, facts.stats, facts.config, facts.units)).wait_result()
    except ProbeFailed as exc:
        return f"cannot be read: {exc}"
    if not end.place:
        return "on the daemon's standard error, which is not kept"
    other = f"; {end.other} lines that are not events are left out" if end.other else ""
    head = f"{end.place}: the last {len(end.lines)} warnings and errors{other}"
    return "\n".join([head, *end.lines])


def write_new(path: Path, text: str) -> None:
    """Write a new file that only its owner can read.

    :raises InvalidArgument: it exists already, or cannot be created.
    :raises PermissionDenied: the caller has no permission to write there.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise InvalidArgument(
            f"{path} exists already", hint="name another file: nothing is overwritten"
        ) from None
    except PermissionError:
        raise PermissionDenied(
            f"{path} may not be written", hint="name a file in a folder of your own"
        ) from None
    except OSError as exc:
        raise _write_error(path, exc) from None
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as exc:
        path.unlink(missing_ok=True)  # a partial report would look complete
        raise _write_error(path, exc) from None


def _write_error(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"{path} cannot be written: {error.strerror}", hint="name another file")
