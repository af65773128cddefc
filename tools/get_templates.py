"""Chat templates for the tests: those that llama.cpp tests, from the engine's source distribution.

Owns `.cache/templates/`. The source distribution was downloaded and checked for the engine's build.
The folder is renamed into place, so an existing one is complete.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from tools.build_engine import ROOT, fetch_sdist, pinned_version

__all__ = ("MISSING", "folder")

MISSING = "the chat templates for the tests are missing: run `make templates`"
SOURCE_FOLDER = "vendor/llama.cpp/models/templates"


def target() -> Path:
    """Return the folder's path. It has the engine's version, so that a new one is extracted."""
    return ROOT / ".cache" / "templates" / pinned_version()


def folder() -> Path | None:
    """Return the folder of the templates, or None if it is missing."""
    return target() if target().is_dir() else None


def main() -> None:
    """Extract the templates unless they exist."""
    if target().is_dir():
        return
    target().parent.mkdir(parents=True, exist_ok=True)
    with (
        tarfile.open(fetch_sdist(pinned_version())) as archive,
        tempfile.TemporaryDirectory(dir=target().parent, prefix=".get-") as scratch,
    ):
        files = Path(scratch) / "files"
        files.mkdir()
        for member in archive:
            path = PurePosixPath(member.name)
            file = archive.extractfile(member)
            if file is not None and path.match(f"*/{SOURCE_FOLDER}/*.jinja"):
                (files / path.name).write_bytes(file.read())
        files.rename(target())


if __name__ == "__main__":
    main()
