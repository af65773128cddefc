"""Files that are named as models but hold something else."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest

from inferd.backends.gguf.facts import other_content
from tests.tiny_gguf import write_split, write_tiny
from tests.tiny_lora import write_lora


def write_kind(path: Path, architecture: str, general_type: str) -> Path:
    file = gguf.GGUFWriter(path, architecture)
    if general_type:
        file.add_string("general.type", general_type)
    # A list that does not fit into the beginning that is read.
    file.add_array("tokenizer.ggml.tokens", [f"a token of some length {n}" for n in range(9000)])
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "general_type", "reason"),
    [
        ("clip", "mmproj", "a projector"),
        ("clip", "", "a projector"),
        ("gemma4uv", "mmproj", "a projector"),
        ("llama", "adapter", "an adapter (LoRA)"),
        ("llama", "imatrix", "an importance matrix"),
        ("controlvector", "", "a control vector"),
    ],
)
def test_a_part_of_a_model_is_named_by_its_kind(
    tmp_path: Path, architecture: str, general_type: str, reason: str
) -> None:
    found = other_content(write_kind(tmp_path / "x.gguf", architecture, general_type))
    assert found is not None and reason in found.reason and not found.is_damaged


@pytest.mark.parametrize("general_type", ["", "model", "vocab"])
def test_a_header_that_continues_behind_the_beginning_is_a_model(
    tmp_path: Path, general_type: str
) -> None:
    assert other_content(write_kind(tmp_path / "x.gguf", "llama", general_type)) is None


@pytest.mark.parametrize("kind", ["llama", "mamba", "bert"])
def test_models_are_none_of_these(tmp_path: Path, kind: str) -> None:
    assert other_content(write_tiny(kind, tmp_path)) is None


def test_the_parts_of_a_split_model_are_none_of_these(tmp_path: Path) -> None:
    assert [other_content(part) for part in write_split(tmp_path)] == [None] * 3


def test_an_adapter_that_was_written_for_a_model_is_one(tmp_path: Path) -> None:
    found = other_content(write_lora(tmp_path / "style.gguf", {}))
    assert found is not None and "inferd add-adapter" in found.reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n  <HTML lang=en>", "a web page"),
        (b"\xef\xbb\xbf<!doctype HTML>", "a web page"),
        (b"<?xml version='1.0'?><Error>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
        (b"Entry not found", "not a GGUF file"),
        (b"\x00" * 5000, "not a GGUF file"),
        (b"PK\x03\x04zip", "not a GGUF file"),
        (b"FUGG", "not a GGUF file"),
    ],
)
def test_contents_that_are_no_model_are_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    found = other_content(path)
    assert found is not None and reason in found.reason and found.is_damaged


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF\3\0\0\0", b"GGUF\3\0\0\0" + b"\xff" * 99])
def test_a_damaged_model_is_left_to_its_load(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert other_content(path) is None


def test_special_files_are_named_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "device.gguf").symlink_to("/dev/null")
    for name in ("pipe", "folder", "device"):
        found = other_content(tmp_path / f"{name}.gguf")
        assert found is not None and found.reason == "it is not a regular file"
    (tmp_path / "dangling.gguf").symlink_to(tmp_path / "nowhere")
    found = other_content(tmp_path / "dangling.gguf")
    assert found is not None and found.reason == "it is a link to a missing file"
    assert other_content(tmp_path / "removed.gguf") is None


def test_a_file_that_cannot_be_reached_is_left_to_its_load(tmp_path: Path) -> None:
    """Its error has another cause than a missing target; such a file may be a model."""
    assert other_content(tmp_path / f"{'x' * 300}.gguf") is None
    (tmp_path / "link.gguf").symlink_to(tmp_path / ("y" * 300))
    assert other_content(tmp_path / "link.gguf") is None
