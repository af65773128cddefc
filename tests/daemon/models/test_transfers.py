"""Files of models that are exported and imported part by part, and the ends of failed transfers."""

from __future__ import annotations

import hashlib
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from inferd.backends.errors import BackendError, Busy, InvalidArgument, UnsupportedOperation
from inferd.daemon.models.transfers import (
    EXPORTS_MAX,
    IMPORTS_MAX,
    ImportedPart,
    ModelExports,
    ModelImport,
    ModelImports,
    check_single_file,
    remove_unfinished,
)
from inferd.daemon.pull.target import locked_name
from inferd.ipc.messages import PART_BYTES

pytestmark = pytest.mark.asyncio

CONTENT = b"GGUF" + (3).to_bytes(4, "little") + bytes(16) + os.urandom(3 * PART_BYTES)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
OWNER, OTHER = object(), object()


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let files of this process grow to *size* bytes only, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder."""
    return sorted(os.listdir(folder))


async def send(
    imports: ModelImports, folder: Path, sha256: str = SHA256, size: int = len(CONTENT)
) -> bool:
    """Import the model m; return whether it has arrived."""
    return await send_file(imports, imports.begin("t", "m", folder, OWNER), CONTENT, sha256, size)


async def send_file(
    imports: ModelImports,
    found: ModelImport,
    content: bytes,
    sha256: str = "",
    size: int = 0,
    *,
    is_projector: bool = False,
) -> bool:
    """Send a file of an import; return whether the import has ended."""
    arrived, sha256 = False, sha256 or hashlib.sha256(content).hexdigest()
    for offset in range(0, len(content), PART_BYTES):
        data = content[offset : offset + PART_BYTES]
        part = ImportedPart(offset, data, size or len(content), sha256, is_projector)
        arrived = await imports.add_part(found, "t", part)
    return arrived


def first_part(data: bytes = CONTENT[:100], offset: int = 0) -> ImportedPart:
    return ImportedPart(offset, data, len(CONTENT))


async def test_a_file_is_exported_in_parts_with_its_hash(tmp_path: Path) -> None:
    file, exports = tmp_path / "m.gguf", ModelExports()
    file.write_bytes(CONTENT)
    export, read, sha256 = exports.begin("t", file, OWNER), b"", ""
    while not sha256:
        part, sha256 = await exports.find("t", OWNER).read_part(len(read))
        read += part
    assert read == CONTENT and sha256 == SHA256 and export.size == len(CONTENT)
    await exports.end("t", OWNER)
    with pytest.raises(InvalidArgument):
        exports.find("t", OWNER)


async def test_exports_are_bounded_and_belong_to_their_connection(tmp_path: Path) -> None:
    exports = ModelExports()
    for number in range(EXPORTS_MAX):
        exports.begin(str(number), tmp_path / "m.gguf", OWNER)
    with pytest.raises(Busy):
        exports.begin("more", tmp_path / "m.gguf", OWNER)
    with pytest.raises(InvalidArgument):
        exports.find("0", OTHER)
    await exports.end("0", OTHER)
    assert len(exports.of_owner(OWNER)) == EXPORTS_MAX
    with pytest.raises(InvalidArgument, match="after 0 bytes"):
        await exports.find("0", OWNER).read_part(7)
    with pytest.raises(BackendError, match="cannot be read"):
        await exports.find("0", OWNER).read_part(0)


async def test_two_ends_of_an_export_do_not_end_the_next_one_with_its_id(tmp_path: Path) -> None:
    exports = ModelExports()
    export = exports.begin("t", tmp_path / "m.gguf", OWNER)

    async def end_and_begin() -> None:
        await exports.end("t", OWNER)
        exports.begin("t", tmp_path / "m.gguf", OWNER)

    async with anyio.create_task_group() as group, export.lock:  # a part is being read
        group.start_soon(end_and_begin)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(exports.end, "t", OWNER)
        await anyio.wait_all_tasks_blocked()
    assert exports.find("t", OWNER) is not export


async def test_models_without_a_file_of_their_own_are_not_exported() -> None:
    for file in (None, Path("m-00001-of-00002.gguf")):
        with pytest.raises(UnsupportedOperation):
            check_single_file("m", file)


async def test_an_imported_file_appears_at_once_and_whole(tmp_path: Path) -> None:
    imports, folder = ModelImports(), tmp_path / "models"
    assert await send(imports, folder)
    assert names_in(folder) == ["m.gguf"]
    assert (folder / "m.gguf").read_bytes() == CONTENT
    with pytest.raises(BackendError, match="exists already"):
        await send(imports, folder)
    assert (folder / "m.gguf").read_bytes() == CONTENT and not imports.of_owner(OWNER)


PROJECTOR = CONTENT[:24] + os.urandom(2 * PART_BYTES)


async def test_a_projector_appears_with_its_model(tmp_path: Path) -> None:
    imports = ModelImports()
    found = imports.begin("t", "m", tmp_path, OWNER)
    assert not await send_file(imports, found, PROJECTOR, is_projector=True)
    assert names_in(tmp_path) == [".m-mmproj.lock", "m-mmproj.gguf.import"]
    assert await send_file(imports, found, CONTENT)
    assert names_in(tmp_path) == ["m-mmproj.gguf", "m.gguf"]
    assert (tmp_path / "m-mmproj.gguf").read_bytes() == PROJECTOR
    assert (tmp_path / "m.gguf").read_bytes() == CONTENT and not imports.of_owner(OWNER)


async def test_a_projector_that_fails_or_whose_model_fails_is_not_kept(tmp_path: Path) -> None:
    for case in ("hash", "end", "model", "order", "disk"):
        imports = ModelImports()
        found = imports.begin("t", "m", tmp_path, OWNER)
        with files_up_to(PART_BYTES if case == "disk" else 1 << 40):
            if case in ("hash", "disk"):
                with pytest.raises(BackendError, match=r"SHA-256|large"):
                    await send_file(imports, found, PROJECTOR, "0" * 64, is_projector=True)
        if case == "order":
            part = ImportedPart(0, PROJECTOR[:100], len(PROJECTOR), "", is_projector=True)
            await imports.add_part(found, "t", part)
            with pytest.raises(InvalidArgument, match="projector is incomplete"):
                await send_file(imports, found, CONTENT)
        if case in ("end", "model"):
            await send_file(imports, found, PROJECTOR, is_projector=True)
        if case == "end":
            await imports.end("t", OWNER)
        if case == "model":
            with pytest.raises(BackendError, match="SHA-256"):
                await send_file(imports, found, CONTENT, "0" * 64)
        assert names_in(tmp_path) == [] and not imports.of_owner(OWNER), case


async def test_a_projector_alone_is_for_a_model_that_is_here(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    for _ in range(2):  # the second time it is there already
        imports = ModelImports()
        found = imports.begin("t", "m", tmp_path, OWNER)
        assert await send_file(imports, found, PROJECTOR, is_projector=True)
        assert names_in(tmp_path) == ["m-mmproj.gguf", "m.gguf"]
        assert (tmp_path / "m-mmproj.gguf").read_bytes() == PROJECTOR


async def test_another_projector_of_the_name_is_kept_and_refuses_the_model(tmp_path: Path) -> None:
    other = tmp_path / "m-mmproj.gguf"
    for content in (PROJECTOR[:-1], PROJECTOR[:-1] + b"\0"):
        other.write_bytes(content)
        imports = ModelImports()
        found = imports.begin("t", "m", tmp_path, OWNER)
        with pytest.raises(BackendError, match="exists already"):
            await send_file(imports, found, PROJECTOR[:-1] + b"\1", is_projector=True)
        assert names_in(tmp_path) == ["m-mmproj.gguf"] and other.read_bytes() == content


async def test_a_model_that_appears_meanwhile_gets_no_projector(tmp_path: Path) -> None:
    imports = ModelImports()
    found = imports.begin("t", "m", tmp_path, OWNER)
    await send_file(imports, found, PROJECTOR, is_projector=True)
    await imports.add_part(found, "t", first_part())
    (tmp_path / "m.gguf").write_bytes(b"another")
    with pytest.raises(BackendError, match="exists already"):
        rest = ImportedPart(100, CONTENT[100:], len(CONTENT), SHA256)
        await imports.add_part(found, "t", rest)
    assert names_in(tmp_path) == ["m.gguf"] and (tmp_path / "m.gguf").read_bytes() == b"another"


async def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    with files_up_to(PART_BYTES * 2), pytest.raises(BackendError) as caught:
        await send(ModelImports(), tmp_path)
    assert "free some space" in caught.value.hint
    assert names_in(tmp_path) == []


async def test_a_file_larger_than_the_free_space_is_refused_at_its_first_part(
    tmp_path: Path,
) -> None:
    with pytest.raises(BackendError, match="needs"):
        await send(ModelImports(), tmp_path, size=1 << 60)
    assert names_in(tmp_path) == []


async def test_files_that_fail_their_checks_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="SHA-256"):
        await send(ModelImports(), tmp_path, sha256="0" * 64)
    with pytest.raises(BackendError, match="more bytes"):
        await send(ModelImports(), tmp_path, size=len(CONTENT) - 1)
    imports = ModelImports()
    page = imports.begin("t", "m", tmp_path, OWNER)
    with pytest.raises(BackendError, match="not a GGUF file"):
        await imports.add_part(page, "t", first_part(b"<html>" * 20))
    assert names_in(tmp_path) == []


async def test_a_part_that_is_not_the_next_one_ends_the_import(tmp_path: Path) -> None:
    imports = ModelImports()
    found = imports.begin("t", "m", tmp_path, OWNER)
    await imports.add_part(found, "t", first_part())
    assert names_in(tmp_path) == [".m.lock", "m.gguf.import"]
    with pytest.raises(InvalidArgument, match="after 100 bytes"):
        await imports.add_part(found, "t", first_part(offset=50))
    assert names_in(tmp_path) == []
    with pytest.raises(InvalidArgument, match="no transfer has this id"):
        await imports.add_part(found, "t", first_part(CONTENT[100:200], 100))
    assert names_in(tmp_path) == []


async def test_a_cancelled_part_leaves_no_file(tmp_path: Path) -> None:
    imports = ModelImports()
    found = imports.begin("t", "m", tmp_path, OWNER)
    await imports.add_part(found, "t", first_part())
    with anyio.CancelScope() as scope:
        scope.cancel()
        await imports.add_part(found, "t", first_part(CONTENT[100:200], 100))
    assert names_in(tmp_path) == [] and not imports.of_owner(OWNER)


async def test_a_name_is_imported_once_at_a_time_and_not_while_it_is_pulled(tmp_path: Path) -> None:
    imports = ModelImports()
    imports.begin("one", "m", tmp_path, OWNER)
    with pytest.raises(Busy):
        imports.begin("two", "m", tmp_path, OTHER)
    await imports.end("one", OTHER)
    assert imports.of_owner(OWNER) == ["one"], "another connection does not end it"
    await imports.end("one", OWNER)
    for number in range(IMPORTS_MAX):
        imports.begin(str(number), f"m{number}", tmp_path, OWNER)
    with pytest.raises(Busy):
        imports.begin("more", "other", tmp_path, OWNER)
    with pytest.raises(InvalidArgument):
        ModelImports().begin("t", "../m", tmp_path, OWNER)
    with locked_name(tmp_path / ".m.lock", "m"), pytest.raises(BackendError, match="pull"):
        await send(ModelImports(), tmp_path)


async def test_only_files_of_killed_daemons_are_removed_at_the_start(tmp_path: Path) -> None:
    for name in ("killed", "killed-mmproj", "running"):
        (tmp_path / f"{name}.gguf.import").write_bytes(b"GGUF")
    (tmp_path / "pulled.gguf.part").write_bytes(b"GGUF")
    with locked_name(tmp_path / ".running.lock", "running"):
        remove_unfinished(tmp_path)
        found = names_in(tmp_path)
    assert found == [".running.lock", "pulled.gguf.part", "running.gguf.import"]
    remove_unfinished(tmp_path / "missing")
