"""The libraries of the web page as they are committed, and `make page-libraries`."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.gateways.http.web_page.api import FILES
from tools import page_libraries
from tools.page_libraries import BYTES_MAX, FOLDER, MANIFEST, integrity_of, read_manifest

LIBRARIES = read_manifest()
PREFIX = "libraries/"
NOTICE = (Path(__file__).resolve().parents[4] / "NOTICE").read_text()
NPM = """\
#!{python}
import shutil, sys
assert sys.argv[1:4] == ["pack", "--silent", "--ignore-scripts"], sys.argv
name, _, version = sys.argv[4].rpartition("@")
shutil.copy(f"{folder}/{{name}}-{{version}}.tgz", ".")
"""


def test_the_manifest_has_the_committed_files_and_their_hashes() -> None:
    expected = {each.file: each.sha256 for library in LIBRARIES for each in library.files}
    found = {
        name.removeprefix(PREFIX): hashlib.sha256(file.data).hexdigest()
        for name, file in FILES.items()
        if name.startswith(PREFIX) and name != PREFIX + MANIFEST
    }
    assert found == expected
    assert len(expected) == sum(len(library.files) for library in LIBRARIES)


def test_each_library_is_pinned_and_has_its_licence() -> None:
    for library in LIBRARIES:
        assert re.fullmatch(r"\d+\.\d+\.\d+", library.version)
        assert re.fullmatch(r"sha512-[A-Za-z0-9+/]{86}==", library.integrity)
        [licence] = [each for each in library.files if each.file.endswith(".LICENSE.txt")]
        assert "copyright" in (FOLDER / licence.file).read_text().lower()
        assert re.search(rf"^ +{library.name} +{library.licence} ", NOTICE, re.MULTILINE)


def test_all_files_together_have_at_most_600_kb() -> None:
    sizes = [path.stat().st_size for path in FOLDER.iterdir()]
    assert sum(sizes) <= BYTES_MAX == 600_000


def test_each_program_of_the_page_that_is_imported_exists() -> None:
    for name, file in FILES.items():
        if not name.endswith(".js") or name.startswith(PREFIX):
            continue
        pattern = r'(?:from|import) ?\(?"\./([\w./-]+)"|new URL\("\./([\w./-]+)"'
        for match in re.finditer(pattern, file.data.decode()):
            assert (match[1] or match[2]) in FILES, (name, match[0])


def package(**files: bytes) -> bytes:
    """Return a package as npm packs it."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return target.getvalue()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a library of version 1.0.0. npm also has 2.0.0, and 3.0.0, which is large."""
    packages, target = tmp_path / "bin", tmp_path / "libraries"
    packages.mkdir()
    target.mkdir()
    packed = package(main=b"old", LICENSE=b"free")
    (packages / "lib-1.0.0.tgz").write_bytes(packed)
    (packages / "lib-2.0.0.tgz").write_bytes(package(main=b"new", LICENSE=b"free"))
    (packages / "lib-3.0.0.tgz").write_bytes(package(main=bytes(BYTES_MAX), LICENSE=b"free"))
    (packages / "npm").write_text(NPM.format(python=sys.executable, folder=packages))
    (packages / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(packages))
    files = [
        {"file": "lib.js", "packed": "main", "sha256": hashlib.sha256(b"old").hexdigest()},
        {"file": "lib.LICENSE.txt", "packed": "LICENSE", "sha256": ""},
    ]
    write_manifest(target, integrity=integrity_of(packed), files=files)
    return target


def write_manifest(folder: Path, **fields: Any) -> None:
    entry = {"name": "lib", "version": "1.0.0", "licence": "MIT", **fields}
    (folder / MANIFEST).write_bytes(msgspec.json.encode([entry]))


def refresh(folder: Path, monkeypatch: pytest.MonkeyPatch, *versions: str) -> int:
    monkeypatch.setattr(sys, "argv", ["page_libraries", "--folder", str(folder), *versions])
    return page_libraries.main()


@pytest.mark.process
def test_the_pinned_version_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refresh(folder, monkeypatch) == 0
    assert (folder / "lib.js").read_bytes() == b"old"
    assert (folder / "lib.LICENSE.txt").read_bytes() == b"free"


@pytest.mark.process
def test_another_version_is_pinned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refresh(folder, monkeypatch, "lib@2.0.0") == 0
    assert (folder / "lib.js").read_bytes() == b"new"
    [library] = read_manifest(folder)
    assert (library.version, library.files[0].sha256) == (
        "2.0.0",
        hashlib.sha256(b"new").hexdigest(),
    )
    assert refresh(folder, monkeypatch) == 0


@pytest.mark.process
@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (["lib@3.0.0"], "the limit is 600000"),
        (["other@1.0.0"], "does not name other"),
        (["lib@9.0.0"], "npm"),
    ],
)
def test_a_refused_version_changes_nothing(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    versions: list[str],
    message: str,
) -> None:
    before = (folder / MANIFEST).read_bytes()
    assert refresh(folder, monkeypatch, *versions) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [MANIFEST]
    assert (folder / MANIFEST).read_bytes() == before


@pytest.mark.process
@pytest.mark.parametrize("part", ["package", "file", "absent"])
def test_a_package_that_is_not_the_pinned_one_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    [library] = msgspec.to_builtins(read_manifest(folder))
    if part == "package":
        library["integrity"] = integrity_of(b"another")
    elif part == "file":
        library["files"][0]["sha256"] = hashlib.sha256(b"another").hexdigest()
    else:
        library["files"][0]["packed"] = "missing"
    write_manifest(folder, **library)
    assert refresh(folder, monkeypatch) == 1
    assert "lib" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [MANIFEST]
