"""The JavaScript libraries of the gateway's web page, and their licences, from npm packages.

Owns `gateways/http/web_page/files/libraries/`. Its `manifest.json` pins each package by version and
integrity (npm's SHA-512 of the package), and each file by its SHA-256. The files are committed,
because pip users have no npm. A package that is a part of another one's file has only its licence
here. `npm pack` downloads the packages; nothing of them is run.

`make page-libraries` gets the pinned versions. `make page-libraries ARGS="katex@0.20.0"` gets
another version of a library, and pins it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from base64 import b64encode
from pathlib import Path

import msgspec

FOLDER = Path(__file__).resolve().parent.parent / "gateways/http/web_page/files/libraries"
MANIFEST = "manifest.json"
BYTES_MAX = 600_000
"""The limit on all files together, which a page loads over a network without a cache."""
PACK_S_MAX = 120


class LibraryFile(msgspec.Struct):
    """A file of a library: its name here, its path in the package, and its SHA-256."""

    file: str
    packed: str
    sha256: str


class Library(msgspec.Struct):
    """A library, its pinned package, and the files that the page has of it."""

    name: str
    version: str
    licence: str
    integrity: str
    files: list[LibraryFile]


class Mismatch(Exception):
    """A package or file differs from the one that the manifest pins."""


def read_manifest(folder: Path = FOLDER) -> list[Library]:
    """Return the libraries that the manifest names."""
    return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=list[Library])


def pack(name: str, version: str) -> bytes:
    """Download a package from the npm registry that npm is configured for, and return it.

    :raises subprocess.SubprocessError: npm fails or takes too long.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", "--ignore-scripts", f"{name}@{version}"]
        subprocess.run(command, cwd=scratch, check=True, timeout=PACK_S_MAX, capture_output=True)
        (package,) = Path(scratch).glob("*.tgz")
        return package.read_bytes()


def integrity_of(package: bytes) -> str:
    """Return a package's integrity in npm's form."""
    return "sha512-" + b64encode(hashlib.sha512(package).digest()).decode()


def unpack(library: Library, package: bytes) -> dict[str, bytes]:
    """Return a library's files by their names here.

    :raises Mismatch: the package or a file is not the pinned one.
    """
    if integrity_of(package) != library.integrity:
        raise Mismatch(f"{library.name}@{library.version} is not the package of the manifest")
    found = {}
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for each in library.files:
            try:
                member = archive.extractfile(f"package/{each.packed}")
            except KeyError:
                member = None
            if member is None:
                raise Mismatch(f"{library.name}@{library.version} has no file {each.packed}")
            data = member.read()
            if each.sha256 and hashlib.sha256(data).hexdigest() != each.sha256:
                raise Mismatch(f"{each.packed} of {library.name} is not the file of the manifest")
            found[each.file] = data
    return found


def refresh(folder: Path, wanted: dict[str, str]) -> int:
    """Write the files of all libraries and the manifest, and return the size of all files.

    *wanted* has new versions by library.

    :raises Mismatch: a package or a file is not the pinned one, or the files are too large.
    """
    libraries, files = read_manifest(folder), dict[str, bytes]()
    if unknown := wanted.keys() - {library.name for library in libraries}:
        raise Mismatch(f"the manifest does not name {', '.join(sorted(unknown))}")
    for library in libraries:
        version = wanted.get(library.name, library.version)
        package = pack(library.name, version)
        if library.name in wanted:
            library.version, library.integrity = version, integrity_of(package)
            for each in library.files:
                each.sha256 = ""
        unpacked = unpack(library, package)
        for each in library.files:
            each.sha256 = hashlib.sha256(unpacked[each.file]).hexdigest()
        files |= unpacked
    size = sum(map(len, files.values()))
    if size > BYTES_MAX:
        raise Mismatch(f"the files have {size} bytes, and the limit is {BYTES_MAX}")
    manifest = msgspec.json.format(msgspec.json.encode(libraries), indent=2) + b"\n"
    for name, data in {**files, MANIFEST: manifest}.items():
        (folder / name).write_bytes(data)
    return size


def main() -> int:
    """Get the libraries, print their versions and their size."""
    parser = argparse.ArgumentParser(
        prog="make page-libraries", description="get the libraries of the web page"
    )
    parser.add_argument("versions", nargs="*", metavar="NAME@VERSION", help="pin another version")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    wanted = {name: version for name, _, version in (v.rpartition("@") for v in args.versions)}
    try:
        size = refresh(args.folder, wanted)
    except (Mismatch, OSError, subprocess.SubprocessError) as exc:
        print(exc, file=sys.stderr)
        return 1
    for library in read_manifest(args.folder):
        print(f"{library.name} {library.version} ({library.licence})")
    print(f"{size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
