"""The choice of a model's projector: by name, by header, by the configuration, by a client."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from inferd import Client, Image
from inferd.backends import MemoryNeed, ModelSpec
from inferd.backends.errors import (
    InvalidArgument,
    LoadFailed,
    ModelNotFound,
    OutOfMemory,
    TooLarge,
)
from inferd.backends.media_process import ProjectorFacts
from inferd.daemon.models import projectors
from inferd.daemon.models.model_files import is_named_projector, signature_of
from inferd.daemon.models.projectors import (
    CHOICES_MAX,
    NO_PROJECTOR,
    UNCLEAR,
    MeasuredProjectors,
    ProjectorChoice,
    ProjectorFinder,
    Projectors,
    Wish,
    encoder_bytes,
    named_below,
    rank_projectors,
    requested_file,
    wish_of,
)
from inferd.daemon.models.specs import with_encoder
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.pictures import png
from tests.tiny_gguf import write_tiny
from tests.tiny_projector import Size, write_pair, write_projector, write_realistic
from tests.waiting import wait_until

WIDTHS = ("embeddings of 32 numbers", "embeddings of 64")


def wish(file: Path, value: str = "auto", requested: str = "") -> Wish:
    return Wish("m", file, value, requested, file.parent)


def find(file: Path, value: str = "auto", requested: str = "") -> ProjectorChoice:
    return ProjectorFinder().find(wish(file, value, requested))


# By name.


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("mmproj-F16.gguf", True),
        ("MMPROJ-model.GGUF", True),
        ("llava-v1.5-7b-mmproj-model-f16.gguf", True),
        ("gemma.mmproj.gguf", True),
        ("mmproj.bin", False),
        ("grammproj.gguf", False),
        ("gemma-3-4b.gguf", False),
    ],
)
def test_a_projector_is_named_as_such(name: str, named: bool) -> None:
    assert is_named_projector(name) is named


QWEN, GEMMA = "Qwen2-VL-2B-Instruct-Q4_K_M.gguf", "gemma-3-4b-it-Q8_0.gguf"


@pytest.mark.parametrize(
    ("model", "others", "ranks"),
    [
        (GEMMA, ["mmproj-F16.gguf"], {"mmproj-F16.gguf": 0}),
        (GEMMA, ["gemma-3-4b-it-Q4_K_M.gguf", "mmproj-F16.gguf"], {"mmproj-F16.gguf": 0}),
        (GEMMA, [QWEN, "mmproj-F16.gguf"], {"mmproj-F16.gguf": UNCLEAR}),
        (GEMMA, ["mmproj-Qwen2-VL-2B.gguf"], {"mmproj-Qwen2-VL-2B.gguf": 0}),
        (GEMMA, [QWEN, "mmproj-Qwen2-VL-2B.gguf"], {}),
        (GEMMA, [QWEN, "mmproj-gemma-3-4b-it-f16.gguf"], {"mmproj-gemma-3-4b-it-f16.gguf": 4}),
        (QWEN, [GEMMA, "Qwen2-VL-2B-mmproj-f32.gguf"], {"Qwen2-VL-2B-mmproj-f32.gguf": 3}),
        (QWEN, ["Qwen2-7B-f16.gguf", "mmproj-Qwen2-VL.gguf"], {"mmproj-Qwen2-VL.gguf": 2}),
        ("Qwen2-7B-f16.gguf", [QWEN, "mmproj-Qwen2-VL.gguf"], {}),
        (GEMMA, [QWEN, "mmproj-other.gguf"], {}),
        ("m-00001-of-00002.gguf", ["m-00002-of-00002.gguf", "mmproj-m.gguf"], {"mmproj-m.gguf": 1}),
        (GEMMA, [QWEN], {}),
    ],
)
def test_a_projector_belongs_to_the_model_whose_name_it_fits_best(
    model: str, others: list[str], ranks: dict[str, int]
) -> None:
    assert rank_projectors(model, [model, *others]) == ranks


# By header.


@pytest.mark.parametrize("kind", ["mlp", "gemma3", "idefics3", "qwen2vl_merger", "ultravox"])
def test_the_projector_beside_a_model_is_taken(tmp_path: Path, kind: str) -> None:
    model, projector = write_pair(kind, tmp_path)
    choice = find(model)
    assert (choice.file, choice.note, choice.refusal) == (str(projector), "", None)
    assert choice.header is not None and choice.header.sounds is (kind == "ultravox")
    assert find(model, "none") == NO_PROJECTOR


def test_a_projector_of_another_width_is_left_out_with_both_widths(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path)
    write_projector("mlp", tmp_path, width=32)
    choice = find(model)
    assert choice.file == "" and choice.refusal is None
    assert choice.note.startswith("mmproj-tiny-mlp.gguf is left out: ")
    assert all(width in choice.note for width in WIDTHS)


def test_a_projector_whose_tokens_the_vocabulary_lacks_is_left_out(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path)
    write_projector("idefics3", tmp_path)
    choice = find(model)
    assert choice.file == "" and "'<fake_token_around_image>'" in choice.note


def test_of_several_that_fit_none_is_taken_and_the_note_says_how_to_choose(tmp_path: Path) -> None:
    model, first = write_pair("mlp", tmp_path)
    write_projector("mlp", tmp_path, width=32).rename(tmp_path / "mmproj-bad.gguf")
    write_projector("mlp", tmp_path)
    second = Path(shutil.copy(first, tmp_path / "mmproj-tiny-mlp-BF16.gguf"))
    choice = find(model)
    assert choice.file == ""
    assert f"several projectors fit, {second.name}, {first.name}: name one" in choice.note
    assert "`mmproj`" in choice.note and "mmproj-bad.gguf is left out" in choice.note
    assert find(model, str(second)).file == str(second)


def test_a_name_that_fits_better_decides_between_two_that_fit(tmp_path: Path) -> None:
    model, projector = write_pair("mlp", tmp_path)
    better = projector.rename(tmp_path / "mmproj-tiny-llama.gguf")
    shutil.copy(better, tmp_path / "mmproj-tiny-other.gguf")
    assert find(model).file == str(better)


def test_a_projector_that_may_belong_to_another_model_is_not_taken(tmp_path: Path) -> None:
    model, projector = write_pair("mlp", tmp_path)
    write_tiny("mamba", tmp_path)
    projector.rename(tmp_path / "mmproj-F16.gguf")
    choice = find(model)
    assert choice.file == "" and "mmproj-F16.gguf may belong to another model" in choice.note


def test_a_file_that_is_no_projector_is_left_out(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path)
    (tmp_path / "mmproj-page.gguf").write_text("<html>")
    shutil.copy(model, tmp_path / "mmproj-model.gguf")
    os.mkfifo(tmp_path / "mmproj-pipe.gguf")
    choice = find(model)
    assert choice.file == "" and choice.note.count("is left out: ") == 3
    for reason in ("not a projector", "not a GGUF file", "not a regular file"):
        assert reason in choice.note


def test_candidates_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projectors, "CANDIDATES_MAX", 2)
    model = write_tiny("llama", tmp_path)
    for name in "abc":
        (tmp_path / f"mmproj-{name}.gguf").touch()
    assert find(model).note.count("is left out") == 2


# By the configuration, and by a client.


def test_a_configured_projector_that_does_not_fit_refuses_the_load(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path)
    bad = write_projector("mlp", tmp_path, width=32)
    for file, words in (
        (bad, WIDTHS),
        (model, ("not a projector",)),
        (tmp_path / "none.gguf", ("cannot be read",)),
    ):
        refusal = find(model, str(file)).refusal
        assert isinstance(refusal, LoadFailed) and "`mmproj`" in refusal.hint
        assert all(word in refusal.message for word in words), refusal.message
        assert refusal.data == {"projector": str(file)}


def test_a_client_names_files_of_the_models_directory_or_beside_the_model(tmp_path: Path) -> None:
    models, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    for folder in (models / "sub", elsewhere):
        folder.mkdir(parents=True)
    (models / "sub" / "x.gguf").touch()
    (elsewhere / "mmproj-y.gguf").touch()
    (elsewhere / "secret.gguf").touch()
    (models / "link.gguf").symlink_to(elsewhere / "secret.gguf")

    def named(text: str) -> Path | None:
        return requested_file(text, elsewhere, models)

    assert named("sub/x.gguf") == models / "sub" / "x.gguf"
    assert named("mmproj-y.gguf") == elsewhere / "mmproj-y.gguf"
    assert named("/guest/models/mmproj-y.gguf") == elsewhere / "mmproj-y.gguf"
    for text in ("secret.gguf", "link.gguf", "../elsewhere/secret.gguf", "none.gguf", "sub", "\0"):
        assert named(text) is None, text
    assert named(str(elsewhere / "secret.gguf")) is None
    assert requested_file("x.gguf", models / "sub", models) == models / "sub" / "x.gguf"
    (models / "sub" / "link.gguf").symlink_to(elsewhere / "secret.gguf")
    assert requested_file("link.gguf", models / "sub", models / "sub") is None


def test_no_place_outside_of_the_models_directory_is_looked_at(tmp_path: Path) -> None:
    models, link = tmp_path / "models", tmp_path / "link"
    models.mkdir()
    link.symlink_to(models)

    for text in ("a.gguf", "sub/../a.gguf", str(link / "a.gguf"), str(models / "a.gguf")):
        found = named_below(text, link)
        assert found is not None and found.parent in (models, link), text
    for text in ("../a.gguf", "sub/../../a.gguf", "/net/host/a.gguf", f"{link}/../a.gguf"):
        assert named_below(text, link) is None, text


def test_a_client_s_file_that_does_not_fit_leaves_the_model_its_own(tmp_path: Path) -> None:
    model, own = write_pair("mlp", tmp_path)
    folder = tmp_path / "sub"
    folder.mkdir()
    write_projector("mlp", folder, width=32)
    other = write_projector("ultravox", folder)
    assert find(model, requested="sub/mmproj-tiny-ultravox.gguf").file == str(other)
    left = find(model, requested="sub/mmproj-tiny-mlp.gguf")
    assert left.file == str(own) and all(width in left.note for width in WIDTHS)
    assert find(model, requested="none.gguf").file == str(own)


@pytest.mark.parametrize(
    ("options", "requested", "value", "named"),
    [
        ({}, {}, "auto", ""),
        ({"mmproj": "none"}, {"mmproj": "x.gguf"}, "none", ""),
        ({"mmproj": "/a.gguf"}, {"mmproj": "x.gguf"}, "/a.gguf", ""),
        ({}, {"mmproj": "x.gguf"}, "auto", "x.gguf"),
        ({}, {"mmproj": "none"}, "none", ""),
        ({}, {"mmproj": "auto"}, "auto", ""),
    ],
)
def test_the_configuration_precedes_a_request(
    options: dict[str, str], requested: dict[str, str], value: str, named: str
) -> None:
    found = wish_of("m", Path("/m.gguf"), "llama", options, Path("/models"), requested)
    assert (found.value, found.requested, found.file) == (value, named, Path("/m.gguf"))
    assert wish_of("m", Path("/m.gguf"), "echo", options, Path("/models")).file is None


# The choices of all models.


@contextmanager
def held(found: Projectors) -> Iterator[None]:
    """Let the thread wait, as for a file server that does not answer."""
    begun, released = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        released.wait()

    found._thread.submit(wait)
    assert begun.wait(30)
    try:
        yield
    finally:
        released.set()


@pytest.mark.asyncio
async def test_a_choice_is_known_until_a_file_changes(tmp_path: Path) -> None:
    found, (model, projector) = Projectors(), write_pair("mlp", tmp_path)
    asked = wish(model)
    assert found.known(asked) is None
    first = await found.choose(asked)
    assert first.file == str(projector) and found.known(asked) is first
    assert await found.choose(asked) is first
    os.utime(projector, ns=(1, 1))
    assert found.known(asked) is None
    assert (await found.choose(asked)).file == str(projector)
    projector.unlink()
    assert found.known(asked) is None
    assert (await found.choose(asked)).file == ""
    write_projector("ultravox", tmp_path)
    assert (await found.choose(asked)).file.endswith("ultravox.gguf")


@pytest.mark.asyncio
async def test_files_that_do_not_answer_delay_a_load_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, (model, projector) = Projectors(), write_pair("mlp", tmp_path)
    monkeypatch.setattr(projectors, "PROJECTOR_S_MAX", 0.01)
    monkeypatch.setattr(projectors, "LISTED_S_MAX", 0.01)
    with held(found):
        late = await found.choose(wish(model))
        assert late.file == "" and "no answer within" in late.note
        named = await found.choose(wish(model, str(projector)))
        assert isinstance(named.refusal, LoadFailed)
        await found.read([wish(model)])
        assert found.known(wish(model)) is None
    monkeypatch.undo()
    assert (await found.choose(wish(model))).file == str(projector)


@pytest.mark.asyncio
async def test_callers_share_a_reading_and_a_cancelled_one_leaves_it(tmp_path: Path) -> None:
    found, (model, projector) = Projectors(), write_pair("mlp", tmp_path)
    files: list[str] = []

    async def choose() -> None:
        files.append((await found.choose(wish(model))).file)

    async with anyio.create_task_group() as group:
        with held(found):
            group.start_soon(choose)
            with anyio.move_on_after(0):
                await found.choose(wish(model))
            assert len(found._reading) == 1
    assert files == [str(projector)] and not found._reading


@pytest.mark.asyncio
async def test_all_models_of_a_list_are_read_at_once_and_a_bounded_number_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projectors, "CHOICES_MAX", 3)
    found, (model, projector) = Projectors(), write_pair("mlp", tmp_path)
    wishes = [wish(model)._replace(model=f"m{number}") for number in range(5)]
    await found.read(wishes)
    known = [found.known(asked) for asked in wishes]
    assert [choice is None for choice in known] == [True, True, False, False, False]
    assert all(choice is None or choice.file == str(projector) for choice in known)


# Memory.


def test_the_measured_buffer_replaces_the_presumed_one_until_the_file_changes(
    tmp_path: Path,
) -> None:
    model, projector = write_pair("mlp", tmp_path)
    choice, spec = find(model), ModelSpec(name="m", path=str(model), mmproj=str(projector))
    assert choice.header is not None
    weights = choice.header.weights_bytes
    assert encoder_bytes(spec, choice, None, 100) == weights * 3 // 2 + 100
    facts = ProjectorFacts(
        kind="mlp", images=True, sounds=False, width=64, weights_bytes=weights, buffer_bytes=7
    )
    measured, signature = MeasuredProjectors(), signature_of([projector])
    measured.note_facts(str(projector), signature, facts)
    assert measured.facts_of(str(projector)) == facts
    assert encoder_bytes(spec, choice, facts, 100) == weights + 107
    os.utime(projector, ns=(1, 1))
    assert measured.facts_of(str(projector)) is None
    for number in range(CHOICES_MAX + 1):
        measured.note_facts(f"/none/{number}", signature_of([Path(f"/none/{number}")]), facts)
    assert measured.facts_of("/none/0") is None and measured.facts_of("/none/1") == facts


def test_a_model_without_a_projector_needs_no_more_memory() -> None:
    need = MemoryNeed(weights=1, process=10)
    assert encoder_bytes(ModelSpec(name="m"), NO_PROJECTOR, None, 100) == 0
    assert with_encoder(need, 0) == need
    assert with_encoder(need, 100).total == 1 + 10 + 110
    media = ModelSpec(name="m", backend="echo", options={"media": True})
    assert encoder_bytes(media, NO_PROJECTOR, None, 100) == 100


# Through a daemon.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a models directory with a model, its projector, and one that fits no model."""
    models = tmp_path / "models"
    (models / "eyes").mkdir(parents=True)
    write_pair("mlp", models / "eyes")
    write_projector("mlp", models / "eyes", width=32).rename(models / "mmproj-narrow.gguf")
    write_projector("mlp", models / "eyes")
    return models


def shown(daemon: RunningDaemon, name: str) -> dict[str, Any]:
    with Client(daemon.socket) as client:
        return dict(client.show(name))


def test_a_model_reads_images_by_the_header_before_it_is_loaded(folder: Path) -> None:
    config = '[models.blind]\nfile = "eyes/tiny-llama.gguf"\nmmproj = ""\n'
    with running_daemon(config, models_dir=folder) as daemon, Client(daemon.socket) as client:
        listed = {model["name"]: model for model in client.models()}
        assert listed.keys() >= {"eyes-tiny-llama", "blind", "echo"}
        assert not [name for name in listed if "mmproj" in name]
        assert listed["eyes-tiny-llama"]["reads"] == ["text", "image"]
        assert listed["blind"]["reads"] == listed["echo"]["reads"] == ["text"]
        projector = shown(daemon, "eyes-tiny-llama")["projector"]
        assert projector["file"] == str(folder / "eyes" / "mmproj-tiny-mlp.gguf")
        assert (projector["type"], projector["kinds"], projector["width"]) == ("mlp", ["image"], 64)
        assert projector["error"] is None and projector["pid"] == 0
        assert shown(daemon, "blind")["projector"] is None
        estimate = shown(daemon, "eyes-tiny-llama")["estimate"]
        assert estimate["projector"] > projector["size_bytes"]
        assert not shown(daemon, "blind")["estimate"]["projector"]
        with pytest.raises(ModelNotFound, match="named as a projector"):
            client.load_by_name("mmproj-narrow")
        listed = inferd("models", "--all", "--json", socket=daemon.socket)
        files = [one["file"] for one in document(listed)["not_offered"]]
        assert files == ["eyes/mmproj-tiny-mlp.gguf", "mmproj-narrow.gguf"]


def test_a_configured_projector_that_does_not_fit_fails_the_load(folder: Path) -> None:
    config = '[models.m]\nfile = "eyes/tiny-llama.gguf"\nmmproj = "mmproj-narrow.gguf"\n'
    with running_daemon(config, models_dir=folder) as daemon, Client(daemon.socket) as client:
        for _ in range(2):
            with pytest.raises(LoadFailed) as caught:
                client.load_by_name("m")
            assert all(width in caught.value.message for width in WIDTHS)
        found = shown(daemon, "m")
        assert found["state"] == "failed" and found["error"]["name"] == "LoadFailed"
        assert all(width in found["projector"]["error"] for width in WIDTHS)
        write_projector("mlp", folder).replace(folder / "mmproj-narrow.gguf")
        client.load_by_name("m")
        assert shown(daemon, "m")["reads"] == ["text", "image"]


def test_a_projector_left_out_by_name_is_noted_and_the_model_loads(folder: Path) -> None:
    (folder / "eyes" / "mmproj-tiny-mlp.gguf").unlink()
    shutil.copy(folder / "mmproj-narrow.gguf", folder / "eyes" / "mmproj-tiny-mlp.gguf")
    with running_daemon(models_dir=folder) as daemon, Client(daemon.socket) as client:
        client.load_by_name("eyes-tiny-llama")
        found = shown(daemon, "eyes-tiny-llama")
        assert found["reads"] == ["text"] and found["memory"]["projector"] == 0
        assert all(width in found["projector"]["note"] for width in WIDTHS)
        assert "model.projector_left_out" in daemon.log


def test_a_client_chooses_the_projector_of_the_load_that_it_causes(folder: Path) -> None:
    ears = write_projector("ultravox", folder)
    with running_daemon(models_dir=folder) as daemon, Client(daemon.socket) as client:
        name = "eyes-tiny-llama"
        graph = client.load_by_name_with_config(name, {"mmproj": ears.name})
        assert graph.not_applied == {}
        assert shown(daemon, name)["reads"] == ["text", "audio"]
        other = client.load_by_name_with_config(name, {"mmproj": "/guest/mmproj-tiny-mlp.gguf"})
        assert other.not_applied == {"mmproj": str(ears)}
        client.unload_model(name, force=True)
        client.load_by_name_with_config(name, {"mmproj": "none"})
        assert shown(daemon, name)["reads"] == ["text"]
        with pytest.raises(InvalidArgument, match="no projector") as caught:
            client.load_by_name_with_config(name, {"mmproj": ears.name})
        assert "mmproj" in caught.value.hint
        client.unload_model(name, force=True)
        assert shown(daemon, name)["reads"] == ["text", "image"], "as others would load it"


def encoder_of(client: Client, name: str) -> int:
    """Return the encoder's process once it has measured the memory that it needs."""

    def measured() -> int:
        projector = client.show(name)["projector"] or {}
        return int(projector["pid"]) if projector.get("buffer_bytes") is not None else 0

    return wait_until(measured)


def test_the_encoder_lives_and_counts_with_its_model_and_a_swap_replaces_it(folder: Path) -> None:
    with running_daemon(models_dir=folder) as daemon, Client(daemon.socket) as client:
        name = "eyes-tiny-llama"
        client.load_by_name(name)
        pids = {encoder_of(client, name)}
        found = shown(daemon, name)
        cache, process = 256 << 20, found["memory"]["process"]
        measured = found["memory"]["projector"] - cache - process
        weights = measured - found["projector"]["buffer_bytes"]
        assert 0 < weights <= found["projector"]["size_bytes"]
        assert found["projector"]["image_tokens_max"] == 16
        assert found["resident_bytes"] > psutil.Process(found["pid"]).memory_info().rss
        (folder / "eyes" / "mmproj-tiny-mlp.gguf").unlink()
        write_projector("ultravox", folder / "eyes")
        client.swap(name, name)
        assert shown(daemon, name)["reads"] == ["text", "audio"]
        pids.add(encoder_of(client, name))
        assert len(pids) == 2
        client.unload_model(name, force=True)
        wait_until(lambda: not any(map(psutil.pid_exists, pids)))
        assert shown(daemon, name)["projector"]["pid"] == 0


def test_a_load_needs_the_memory_of_its_projector(folder: Path) -> None:
    """The model alone needs 90 MB."""
    name, limit = "eyes-tiny-llama", f"[daemon]\nmemory-bytes = {200 << 20}\n"
    with running_daemon(limit, models_dir=folder) as daemon, Client(daemon.socket) as client:
        with pytest.raises(OutOfMemory) as caught:
            client.load_by_name(name)
        assert "media-cache-bytes" in caught.value.hint
        assert caught.value.data["needed_bytes"] > 256 << 20
        client.load_by_name_with_config(name, {"mmproj": "none"})
        assert (shown(daemon, name)["memory"] or {})["total"] < 200 << 20
    less = limit + "media-cache-bytes = 0\n"
    with running_daemon(less, models_dir=folder) as daemon, Client(daemon.socket) as client:
        client.load_by_name(name)
        assert shown(daemon, name)["reads"] == ["text", "image"]
        assert encoder_of(client, name)


def test_an_image_that_no_step_holds_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    model = write_tiny("gemma3-images", tmp_path)
    write_realistic("gemma3", tmp_path, width=64, size=Size(image=128))
    config = f"[models.{model.stem}]\nbatch-size = 32\nctx-size = 512\n"
    with (
        running_daemon(config, models_dir=tmp_path) as daemon,
        Client(daemon.socket) as client,
        client.session(model.stem) as session,
    ):
        with pytest.raises(TooLarge, match="64 tokens, which see each other") as caught:
            session.chat(["hello", Image(png(64, 64))])
        assert caught.value.data["tokens_max"] == 32
