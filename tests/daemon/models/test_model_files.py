"""The models directory: names of its files, and reasons why files get none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferd.backends.gguf.facts import OtherContent, other_content
from inferd.backends.model_encodings import PYTORCH_FILE
from inferd.daemon.config.model_settings import ModelConfig
from inferd.daemon.models import model_files
from inferd.daemon.models.model_files import PROJECTOR, files_in_use, files_not_offered, find_models
from tests.onnx_graphs import affine, write_graphs


def write_files(folder: Path, *paths: str) -> None:
    for path in paths:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def names_in(folder: Path) -> dict[str, str]:
    files = find_models(folder).files
    return {name: str(file.relative_to(folder)) for name, file in files.items()}


def test_all_files_of_the_directory_and_its_folders_are_offered(tmp_path: Path) -> None:
    write_files(tmp_path, "a.gguf", "B.GGUF", "my model.gguf", "c:d.gguf", "mod\u00e8le.gguf")
    write_files(tmp_path, "sub/a.gguf", "sub/deep/e.gguf", "notes.txt", "a.gguf.part")
    write_files(tmp_path, "s-00001-of-00002.gguf", "s-00002-of-00002.gguf", ".git/x.gguf")
    write_files(tmp_path, "sub/t-00002-of-00002.gguf")
    assert names_in(tmp_path) == {
        "B": "B.GGUF",
        "a": "a.gguf",
        "c-d": "c:d.gguf",
        "mod-le": "mod\u00e8le.gguf",
        "my-model": "my model.gguf",
        "s": "s-00001-of-00002.gguf",
        "sub-a": "sub/a.gguf",
        "sub-deep-e": "sub/deep/e.gguf",
        "sub-t": "sub/t-00001-of-00002.gguf",
    }
    assert find_models(tmp_path).refused == {}


@pytest.mark.parametrize(
    ("paths", "offered"),
    [
        (("a b.gguf", "a:b.gguf"), None),
        (("a b.gguf", "a:b.gguf", "a;b.gguf"), None),
        (("a/b.gguf", "a b.gguf"), None),
        (("a-b.gguf", "a b.gguf"), "a-b.gguf"),
        (("a-b.gguf", "a/b.gguf"), "a-b.gguf"),
        (("a-b.gguf", "a-b.GGUF"), "a-b.gguf"),
        (("a-b-00001-of-00002.gguf", "a b.gguf"), "a-b-00001-of-00002.gguf"),
    ],
)
def test_files_whose_names_become_the_same_are_named(
    tmp_path: Path, paths: tuple[str, ...], offered: str | None
) -> None:
    """A file that has the name keeps it; of several others none gets it."""
    write_files(tmp_path, *paths)
    assert names_in(tmp_path) == ({} if offered is None else {"a-b": offered})
    refused = find_models(tmp_path).refused
    assert refused.keys() == {*paths} - {offered}
    for path, reason in refused.items():
        assert "'a-b'" in reason
        assert all(other in reason for other in paths if other != path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("\u65e5\u672c.gguf", "no letter A-Z and no digit"),
        ("---.gguf", "no letter A-Z and no digit"),
        (".hidden.gguf", "begins with a dot"),
        ("sub/._x.gguf", "begins with a dot"),
        (os.fsdecode(b"\xff.gguf"), "not UTF-8"),
        ("x-00001-of-00002.GGUF", "only if they end in .gguf"),
    ],
)
def test_a_file_that_gets_no_name_is_refused_with_the_reason(
    tmp_path: Path, path: str, reason: str
) -> None:
    write_files(tmp_path, path)
    found = find_models(tmp_path)
    assert found.files == {} and reason in found.refused[path]
    [shown] = files_not_offered(tmp_path, found, {}, lambda _: None)
    assert shown.file.encode() and not shown.is_expected, "every client can read its name"


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    write_files(tmp_path / "elsewhere", "x.gguf")
    models = tmp_path / "models"
    models.mkdir()
    (models / "big").symlink_to(tmp_path / "elsewhere")
    (models / "loop").symlink_to(models)
    (models / "self").symlink_to(models / "self")
    assert names_in(models) == {"big-x": "big/x.gguf"}


def test_a_folder_that_is_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, "1/2/3/4/in.gguf", "1/2/3/4/5/out.gguf")
    assert names_in(tmp_path) == {"1-2-3-4-in": "1/2/3/4/in.gguf"}
    assert find_models(tmp_path).refused == {"1/2/3/4/5/": "folders are read to a depth of 4"}
    monkeypatch.setattr(model_files, "ENTRIES_MAX", 3)
    write_files(tmp_path, "a.gguf", "6/b.gguf", "6/c.gguf", "6/d.gguf")
    found = find_models(tmp_path)
    assert [*found.files] == ["a"]
    assert "more than 3 entries" in found.refused["1/"] + found.refused.get("6/", "")


def test_a_missing_directory_has_no_models(tmp_path: Path) -> None:
    found = find_models(tmp_path / "none")
    assert (found.files, found.refused, found.exists) == ({}, {}, False)
    with pytest.raises(NotADirectoryError):
        (tmp_path / "file").touch()
        find_models(tmp_path / "file")


def test_contents_and_configured_names_are_reasons_too(tmp_path: Path) -> None:
    write_files(tmp_path, "a.gguf", "own.gguf", "page.gguf", "projector.gguf", "taken.gguf")
    contents = {
        tmp_path / "page.gguf": OtherContent("it is a web page"),
        tmp_path / "projector.gguf": OtherContent("it is a projector", is_damaged=False),
        tmp_path / "own.gguf": OtherContent("it is not a GGUF file"),
    }
    configured = {
        "own": ModelConfig(options={"slots": 1}),
        "taken": ModelConfig(file=tmp_path / "a.gguf"),
    }
    found = find_models(tmp_path)
    assert files_not_offered(tmp_path, found, configured, contents.get) == [
        ("page.gguf", "it is a web page", False),
        ("projector.gguf", "it is a projector", True),
        ("taken.gguf", "[models.taken] gives its name to another model", True),
    ]


def test_files_named_as_projectors_are_no_models_and_take_no_names(tmp_path: Path) -> None:
    names = ("a/mmproj-F16.gguf", "b/mmproj-F16.gguf", "mmproj-x.gguf", "x-mmproj.gguf", "x.gguf")
    write_files(tmp_path, *names)
    found = find_models(tmp_path)
    assert [*found.files] == ["x"] and found.refused == {}
    assert [*found.projectors] == sorted(names[:4])
    assert found.refusal_of("mmproj-x") == found.refusal_of("mmproj-x.gguf") == PROJECTOR
    assert found.refusal_of("x") == ""
    page = {tmp_path / "mmproj-x.gguf": OtherContent("it is a web page")}
    assert files_not_offered(tmp_path, found, {}, page.get) == [
        ("a/mmproj-F16.gguf", PROJECTOR, True),
        ("b/mmproj-F16.gguf", PROJECTOR, True),
        ("mmproj-x.gguf", "it is a web page", False),
        ("x-mmproj.gguf", PROJECTOR, True),
    ]


def test_a_graph_is_offered_unless_its_download_has_failed(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"good": affine(), "both": affine(), "page": b"<html>", "empty": b""})
    (tmp_path / "both.gguf").write_bytes(b"GGUF")
    found = find_models(tmp_path)
    assert found.files["good"] == tmp_path / "good.onnx"
    assert found.files["both"] == tmp_path / "both.gguf"
    others = files_not_offered(tmp_path, found, {}, other_content)
    assert {one.file: one.reason for one in others} == {
        "both.onnx": "its name 'both' is also that of both.gguf: rename it",
        "empty.onnx": "it is empty: its download or copy has failed",
        "page.onnx": "it is a web page: download the file itself",
    }


def test_a_pytorch_file_gets_no_name_and_another_file_may_have_it(tmp_path: Path) -> None:
    write_files(tmp_path, "a.pt", "b.PTH", "b.tflite")
    found = find_models(tmp_path)
    assert found.files == {"b": tmp_path / "b.tflite"}
    assert found.refused == {"a.pt": PYTORCH_FILE, "b.PTH": PYTORCH_FILE}
    assert found.refusal_of("a") == PYTORCH_FILE and "torch.onnx.export" in PYTORCH_FILE


def test_of_several_graphs_of_a_name_the_first_format_has_it(tmp_path: Path) -> None:
    write_files(tmp_path, "a.tflite", "a.onnx", "b.tflite", "b.gguf", "c.xml", "c.tflite")
    write_files(tmp_path, "d.xml", "d/saved_model.pb", "e/saved_model.pb", "e.f/saved_model.pb")
    found = find_models(tmp_path)
    names = {name: str(file.relative_to(tmp_path)) for name, file in found.files.items()}
    assert names == {
        **{"a": "a.onnx", "b": "b.gguf", "c": "c.tflite", "d": "d.xml"},
        **{"e": "e/saved_model.pb", "e.f": "e.f/saved_model.pb"},
    }
    assert set(found.refused) == {"a.tflite", "b.tflite", "c.xml", "d/saved_model.pb"}


def test_the_files_of_a_graph_are_known(tmp_path: Path) -> None:
    write_files(
        tmp_path, "a.xml", "a.bin", "b.xml", "c.bin", "s/saved_model.pb", "x_saved_model.pb"
    )
    write_files(
        tmp_path, "s/variables/variables.index", "s/variables/variables.data-00000-of-00001"
    )
    assert files_in_use(tmp_path / "a.xml") == [tmp_path / "a.xml", tmp_path / "a.bin"]
    assert files_in_use(tmp_path / "b.xml") == [tmp_path / "b.xml"]
    folder = tmp_path / "s"
    assert files_in_use(folder / "saved_model.pb") == [
        folder / "saved_model.pb",
        folder / "variables" / "variables.data-00000-of-00001",
        folder / "variables" / "variables.index",
    ]
    assert set(find_models(tmp_path).files) == {"a", "b", "s"}


def test_xml_is_offered_if_it_is_a_graph(tmp_path: Path) -> None:
    texts = {"a": '<?xml version="1.0"?>\n<net name="a">', "b": "<?xml?><x/>", "c": "<html>"}
    for name, text in texts.items():
        (tmp_path / f"{name}.xml").write_text(text)
    others = files_not_offered(tmp_path, find_models(tmp_path), {}, other_content)
    assert others == [
        ("b.xml", "it is XML, and not a graph of OpenVINO", True),
        ("c.xml", "it is a web page: download the file itself", False),
    ]
