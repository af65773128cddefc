"""Each file that cannot be loaded is refused with a cause and a hint; nothing is printed."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from inferd.backends import Chunk, LanguageModel, ModelSpec, estimate_memory, load_model
from inferd.backends.base import SpecialToken
from inferd.backends.errors import Cancelled, InvalidArgument, LoadFailed, UnsupportedOperation
from inferd.backends.llama.loading.devices import is_by_old_gcc
from tests.backends.driving import load_language_model
from tests.models import gemma3, smollm2
from tests.processes import open_descriptors
from tests.tiny_gguf import VOCAB_SIZE, write_split, write_tiny


@pytest.mark.parametrize(
    ("compiler", "is_old"),
    [
        (b"\0GCC: (Debian 12.2.0-14+deb12u1) 12.2.0\0", True),
        (b"GCC: (GNU) 13.3.1\0clang version 18.1.8\0", True),
        (b"GCC: (Debian 14.2.0-19) 14.2.0\0", False),
        (b"Debian clang version 14.0.6\0", False),
        (b"", False),
    ],
)
def test_a_library_of_a_compiler_that_breaks_amx_is_recognised(
    compiler: bytes, is_old: bool
) -> None:
    assert is_by_old_gcc(b"\x7fELF" + compiler + b"\0") == is_old


def load(path: Path | str, **fields: Any) -> LanguageModel:
    spec = ModelSpec(
        **{
            "name": "tiny",
            "path": str(path),
            "slots": 2,
            "ctx_size": 256,
            "batch_size": 32,
            "threads": 1,
            **fields,
        }
    )
    return load_language_model(spec)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny"))


def refusal(path: Path | str) -> LoadFailed:
    with pytest.raises(LoadFailed) as caught:
        load(path)
    assert os.path.basename(path) in caught.value.message
    assert os.path.dirname(path) not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_a_missing_file(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.gguf").message


def test_an_invalid_path() -> None:
    with pytest.raises(LoadFailed, match="null"):
        load("a\0b")


def test_a_directory(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path).message


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf").message


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the error, because root may read every file."""

    def forbid(*_args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbid)
    found = refusal(tmp_path / "secret.gguf")
    assert "Permission denied" in found.message and "let the user" in found.hint


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    assert "is empty" in refusal(tmp_path / "empty.gguf").message


@pytest.mark.parametrize("content", [b"G", b"PK\x03\x04 a zip", b"<html>" * 100])
def test_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "page.gguf").write_bytes(content)
    assert "is not a GGUF file" in refusal(tmp_path / "page.gguf").message


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_another_version(tmp_path: Path, tiny: Path, version: int) -> None:
    data = bytearray(tiny.read_bytes())
    struct.pack_into("<I", data, 4, version)
    (tmp_path / "future.gguf").write_bytes(data)
    assert f"version {version}" in refusal(tmp_path / "future.gguf").message


@pytest.mark.parametrize("kept", [4, 7, 20, 24, 100, 3000, 9000, -100_000, -1])
def test_a_file_cut_off_anywhere(tmp_path: Path, tiny: Path, kept: int) -> None:
    (tmp_path / "half.gguf").write_bytes(tiny.read_bytes()[:kept])
    found = refusal(tmp_path / "half.gguf")
    assert "cut off" in found.message or "past the file's end" in found.message
    assert found.hint == "download the file again"


@pytest.mark.parametrize("offset", [8, 16])
@pytest.mark.parametrize("count", [1 << 20, (1 << 63) - 1, (1 << 64) - 1])
def test_a_garbage_count_takes_neither_time_nor_memory(
    tmp_path: Path, tiny: Path, offset: int, count: int
) -> None:
    data = bytearray(tiny.read_bytes())
    struct.pack_into("<Q", data, offset, count)
    (tmp_path / "garbage.gguf").write_bytes(data)
    assert "damaged" in refusal(tmp_path / "garbage.gguf").message


def test_garbage_anywhere_in_the_header_gives_an_error_or_a_header(
    tmp_path: Path, tiny: Path
) -> None:
    """Only inferd's reader is tested; llama.cpp may abort the worker for such a file."""
    from inferd.backends.llama.loading.gguf_check import read_gguf

    whole, path = tiny.read_bytes(), tmp_path / "garbage.gguf"
    refused = 0
    for position in range(8, 3000, 7):
        path.write_bytes(whole[:position] + b"\xff" * 9 + whole[position + 9 :])
        with path.open("rb") as file:
            try:
                read_gguf(file.fileno(), path.name)
            except LoadFailed:
                refused += 1
    assert refused > 100


def test_an_unknown_architecture(tmp_path: Path) -> None:
    found = refusal(write_tiny("unheard-of", tmp_path))
    assert "unknown model architecture: 'unheard-of'" in found.message


def test_an_encoder_makes_embeddings_and_generates_nothing(tmp_path: Path) -> None:
    model = load(write_tiny("bert", tmp_path))
    assert not model.info.generates
    with pytest.raises(UnsupportedOperation, match="only makes embeddings"):
        model.step([Chunk(0, [5], 0, logits=True)])
    for slot in range(model.info.slots):
        assert model.length(slot) == model.trim(slot, 0) == 0
    model.close()


def test_an_encoder_that_llama_cpp_runs_only_for_a_decoder_is_refused(tmp_path: Path) -> None:
    """A load and an estimate both refuse it."""
    path = write_tiny("t5-encoder", tmp_path)
    with pytest.raises(UnsupportedOperation, match="has an encoder") as caught:
        load(path)
    assert "'tiny-t5-encoder" in caught.value.message and "decoder-only" in caught.value.hint
    with pytest.raises(UnsupportedOperation, match="has an encoder"):
        estimate_memory(ModelSpec(name="tiny-t5", path=str(path))).close()


@pytest.mark.parametrize(
    ("architecture", "kind", "words"),
    [
        ("clip", "mmproj", "a projector"),
        ("clip", "", "a projector"),
        ("llama", "adapter", "LoRA"),
        *((name, "", "a draft model") for name in ("eagle3", "dflash", "gemma4-assistant")),
        ("wavtokenizer-dec", "", "a vocoder"),
    ],
)
def test_files_that_are_not_complete_models(
    tmp_path: Path, architecture: str, kind: str, words: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "half.gguf", architecture)
    if kind:
        writer.add_type(kind)
    writer.add_tensor("v.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedOperation, match=words) as caught:
        load(tmp_path / "half.gguf")
    assert "'half.gguf'" in caught.value.message


def test_plamo_2_runs_in_one_slot(tmp_path: Path) -> None:
    """llama.cpp mixes up its texts that are computed together."""
    writer = gguf.GGUFWriter(tmp_path / "half.gguf", "plamo2")
    writer.add_tensor("v.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedOperation, match="one slot") as caught:
        load(tmp_path / "half.gguf", slots=2)
    assert "slots = 1" in caught.value.hint
    with pytest.raises(LoadFailed):  # the rest of the file is missing
        load(tmp_path / "half.gguf", slots=1)


# Split models.


def test_a_split_model_equals_the_unsplit_one(tmp_path: Path, tiny: Path) -> None:
    whole = load(tiny)
    parts = write_split(tmp_path)
    for part in parts:
        model = load(part)
        assert model.info.parameters == whole.info.parameters
        assert model.info.vocab_hash == whole.info.vocab_hash
        model.close()
    whole.close()


def test_each_part_of_a_split_model_changes_its_fingerprint(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    before = load(parts[0])
    data = bytearray(parts[2].read_bytes())
    data[-1] ^= 1
    parts[2].write_bytes(data)
    after = load(parts[0])
    assert before.info.fingerprint != after.info.fingerprint
    before.close()
    after.close()


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part(tmp_path: Path, missing: int) -> None:
    parts = write_split(tmp_path)
    parts[missing].unlink()
    with pytest.raises(LoadFailed) as caught:
        load(parts[0])
    assert parts[missing].name in caught.value.message


def test_a_part_that_is_cut_off(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[1].write_bytes(parts[1].read_bytes()[:-100])
    with pytest.raises(LoadFailed, match="cut off") as caught:
        load(parts[0])
    assert parts[1].name in caught.value.message


def test_a_part_under_another_name(tmp_path: Path) -> None:
    part = write_split(tmp_path)[0].rename(tmp_path / "renamed.gguf")
    assert "one of 3 parts" in refusal(part).message


@pytest.mark.parametrize(
    "fields",
    [
        {"options": {"flash-attn": "maybe"}},
        {"options": {"unheard-of": 1}},
        {"slots": 0},
        {"slots": 257},
        {"slots": 256, "ctx_size": 1 << 24},
        {"ctx_size": -1},
        {"batch_size": 0},
    ],
    ids=str,
)
def test_wrong_parameters(tiny: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        load(tiny, **fields)


def test_a_load_can_be_cancelled(tiny: Path) -> None:
    with pytest.raises(Cancelled):
        load_model(ModelSpec(name="tiny", path=str(tiny)), lambda _: False)


def test_an_exception_of_the_progress_callback_is_raised(tiny: Path) -> None:
    def fail(_done: float) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load_model(ModelSpec(name="tiny", path=str(tiny)), fail)


@pytest.mark.model
def test_progress_rises_to_one() -> None:
    seen: list[float] = []

    def progress(done: float) -> bool:
        seen.append(done)
        return True

    load_model(ModelSpec(name="s", path=str(smollm2()), ctx_size=256), progress).close()
    assert len(seen) > 2 and seen == sorted(seen) and seen[-1] == 1.0


def test_a_descriptor_is_loaded_several_times_after_the_file_was_deleted(
    tmp_path: Path, tiny: Path
) -> None:
    path = tmp_path / "gone.gguf"
    path.write_bytes(tiny.read_bytes())
    with path.open("rb") as file:
        path.unlink()
        file.seek(77)
        for _ in range(2):
            model = load("", fd=file.fileno())
            model.step([Chunk(0, [5], 0, True)])
            assert model.info.vocab_size == VOCAB_SIZE
            model.close()
        os.fstat(file.fileno())


def test_a_descriptor_that_cannot_be_read(tiny: Path) -> None:
    fd = os.open(tiny, os.O_WRONLY)
    try:
        with pytest.raises(LoadFailed, match="cannot be read"):
            load("", fd=fd)
    finally:
        os.close(fd)


def test_an_invalid_descriptor() -> None:
    with pytest.raises(LoadFailed, match="descriptor"):
        load("", fd=987)


def test_no_descriptor_is_left_open(tmp_path: Path, tiny: Path) -> None:
    before = len(open_descriptors())
    load(tiny).close()
    with tiny.open("rb") as file:
        load("", fd=file.fileno()).close()
    with pytest.raises(LoadFailed):
        load(write_tiny("unheard-of", tmp_path))
    assert len(open_descriptors()) == before


def test_the_facts_of_a_model(tiny: Path) -> None:
    model = load(tiny, ctx_size=257, slots=3)
    info = model.info
    assert (info.ctx_size, info.slots, info.ctx_size_trained) == (512, 3, 4096)
    assert info.size_bytes == info.parameters * 4
    assert info.token_bytes_max == len("<0x00>")
    assert info.special_tokens == {
        "bos": SpecialToken(1, "<s>"), "eos": SpecialToken(2, "</s>"), "nl": SpecialToken(13, "\n"),
    }  # fmt: skip
    model.close()


def test_a_context_size_of_zero_is_the_default_of_the_model(tiny: Path) -> None:
    model = load(tiny, ctx_size=0, slots=1)
    assert model.info.ctx_size == 4096
    model.close()


@pytest.mark.model
def test_gemma_is_loaded_within_seconds_with_a_vocabulary_of_its_own() -> None:
    gemma, smol = load(gemma3()), load(smollm2())
    assert gemma.info.vocab_size == 262_144
    assert gemma.info.vocab_hash != smol.info.vocab_hash
    assert gemma.info.fingerprint != smol.info.fingerprint
    gemma.close()
    smol.close()


def test_llama_cpp_prints_nothing(tmp_path: Path, tiny: Path) -> None:
    """Nothing is printed at an import, a load, a failed load or a step."""
    bad = write_tiny("unheard-of", tmp_path)
    code = (
        "import sys\n"
        "from inferd.backends import Chunk, InferdError, ModelSpec, load_model\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        model = load_model(ModelSpec(name='m', path=path, threads=1), lambda _: True)\n"
        "        model.step([Chunk(0, [5], 0, True)])\n"
        "        model.close()\n"
        "    except InferdError:\n"
        "        pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny), str(bad)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert (done.stdout, done.stderr) == (b"", b"")
