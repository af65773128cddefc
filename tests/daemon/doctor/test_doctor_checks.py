"""The doctor's checks and probes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace as replace_fields

from inferd.backends.library import LLAMA_COMMIT, install_command
from inferd.backends.memory import Device
from inferd.backends.tuning_choice import ModelShape, Setting, TuningRecord, this_cpu
from inferd.daemon.config.model_settings import ModelConfig
from inferd.daemon.config.settings import Config
from inferd.daemon.config.sources import load_config
from inferd.daemon.doctor.checks import configuration as settings
from inferd.daemon.doctor.checks import connection as reach
from inferd.daemon.doctor.checks import engine_checks as engine
from inferd.daemon.doctor.checks import folders as places
from inferd.daemon.doctor.checks import machine_limits as machine
from inferd.daemon.doctor.checks import units
from inferd.daemon.doctor.checks.accounts import (
    READ,
    SEARCH,
    WRITE,
    Account,
    find_denial,
    may,
    own_account,
)
from inferd.daemon.doctor.checks.configuration import check_tuned_settings, inspect_tuned_settings
from inferd.daemon.doctor.checks.machine_limits import check_engine_options
from inferd.daemon.doctor.finding import Finding, fail, ok, warn, worst
from inferd.daemon.doctor.time_limits import Probe, ProbeFailed
from inferd.daemon.models.model_files import missing_files
from inferd.daemon.models.tuning_records import TuningRecords
from inferd.daemon.service.install import Service, Write, install_plan
from inferd.daemon.state_files import TUNING_FILE
from tests import onnx_graphs
from tests.daemon.other_users import BOB, as_user
from tests.tiny_gguf import write_split, write_tiny
from tests.tiny_lora import write_lora
from tests.tiny_projector import write_pair, write_projector

GIB = 1 << 30
ADA = Account("ada", 4711, frozenset((4711, 99)))
MACHINE = machine.Machine(
    free_bytes=8 * GIB,
    total_bytes=16 * GIB,
    memory_bytes=16 * GIB,
    swapped_bytes=0,
    stalled_percent=0.0,
    files_max=65536,
    locked_max=8 << 20,
    cores=4,
    cores_usable=4,
    load=0.5,
    has_distinct_users=True,
)
REACH = reach.ConnectionFacts(
    "/run/inferd/inferd.sock",
    exists=True,
    is_socket=True,
    owner="root",
    group="inferd",
    mode=0o660,
    software=reach.SOFTWARE,
    llama_commit=LLAMA_COMMIT,
    stats={"pid": 7, "components": [], "pending_restart": []},
)
ENGINE = engine.EngineReport(system_info="CPU : AVX = 1 | AVX2 = 1 | FMA = 1 |")


def config(**flags: object) -> Config:
    return load_config(flags, {})


def only(findings: Iterable[Finding]) -> Finding:
    """Return the only finding that is not ok, or else the last finding."""
    found = list(findings)
    wrong = [f for f in found if f.status != "ok"]
    assert len(wrong) <= 1 and found
    assert all(f.remedy for f in wrong), "each problem has a remedy"
    return wrong[0] if wrong else found[-1]


# Probes.


def test_a_probe_that_never_ends_is_given_up() -> None:
    never = threading.Event()
    with pytest.raises(ProbeFailed, match=r"no answer within 0\.05 s"):
        Probe(never.wait, 0.05).wait_result()
    never.set()


def test_a_failed_probe_names_its_error() -> None:
    with pytest.raises(ProbeFailed, match="/none/such: No such file or directory"):
        Probe(Path("/none/such").read_text).wait_result()
    with pytest.raises(ProbeFailed, match="ZeroDivisionError"):
        Probe(lambda: 1 // 0).wait_result()
    assert Probe(lambda: 7).wait_result() == 7


def test_the_worst_finding_counts() -> None:
    well, doubtful, wrong = ok("x"), warn("x", "y"), fail("x", "y")
    assert worst([well]) == worst([]) == "ok"
    assert worst([doubtful, well]) == "warn" and worst([well, wrong, doubtful]) == "fail"


# Users.


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "wanted", "allowed"),
    [
        (0o700, 4711, 0, READ | WRITE | SEARCH, True),
        (0o077, 4711, 99, READ, False),
        (0o750, 0, 99, READ | SEARCH, True),
        (0o750, 0, 99, WRITE, False),
        (0o705, 0, 0, READ | SEARCH, True),
        (0o770, 0, 0, READ, False),
    ],
)
def test_a_mode_grants_or_denies_access(
    mode: int, uid: int, gid: int, wanted: int, allowed: bool
) -> None:
    status = os.stat_result((0o40000 | mode, 0, 0, 0, uid, gid, 0, 0, 0, 0))
    assert may(ADA, status, wanted) is allowed
    assert may(msgspec.structs.replace(ADA, uid=0), status, wanted), "root may do everything"


def test_the_folder_that_denies_access_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        inner = top / "inner" / "most"
        inner.mkdir(parents=True)
        assert find_denial(ADA, inner, READ) == str(top), "it is 0700"
        top.chmod(0o711)
        inner.parent.chmod(0o700)
        assert find_denial(ADA, inner, READ) == str(inner.parent)
        inner.parent.chmod(0o711)
        inner.chmod(0o711)
        assert find_denial(ADA, inner, READ) == str(inner)
        assert find_denial(ADA, inner, SEARCH) == ""
        assert find_denial(own_account(), inner, READ | WRITE) == ""


# The engine.


def test_missing_packages_and_wrong_versions_are_named() -> None:
    pins = {"llama-cpp-python": "0.3.36"}
    there = {"jinja2": "3.1.6", "llama-cpp-python": "0.3.36"}
    assert only(engine.check_installed(engine.Installed(there, pins))).status == "ok"
    none = engine.Installed(dict.fromkeys(there, ""), pins)
    missing = only(engine.check_installed(none))
    assert missing.status == "warn" and "jinja2, llama-cpp-python: not" in missing.found
    assert install_command("daemon") in missing.remedy
    other = engine.Installed(there | {"llama-cpp-python": "0.3.35"}, pins)
    found = only(engine.check_installed(other))
    assert found.status == "fail" and found.remedy == "pip install 'llama-cpp-python==0.3.36'"


def test_the_packages_of_the_daemon_are_found() -> None:
    found = engine.find_packages()
    assert set(found.packages) >= {"llama-cpp-python", "numpy", "structlog", "psutil"}
    assert set(found.pinned) == {"llama-cpp-python"}
    assert all(found.packages.values())
    assert "rich" not in found.packages, "the client's are there in any case"


def child(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "it ends by SIGILL"),
        ("import os; os.abort()", "it ends by SIGABRT"),
        ("raise ImportError('libllama.so: cannot open')", "libllama.so: cannot open"),
        ("", "it wrote nothing"),
    ],
)
def test_an_engine_that_ends_its_process_is_a_finding(code: str, ended: str) -> None:
    seen = engine.probe_engine([], child(code))
    found = only(engine.check_engine(seen))
    assert found.status == "fail" and ended in found.found and "--no-binary" in found.remedy
    assert list(engine.check_cpu(seen, frozenset({"avx2"}))) == []


@pytest.mark.process
def test_an_engine_that_hangs_is_given_up_and_its_output_counts(tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    printed.write_text(
        '{"system_info": "AVX = 1", "gpu": false, "devices": []}\n{"path": "a"}\n{"pa'
    )
    hanging = ("sh", "-c", f"cat {printed}; exec sleep 60")
    seen = engine.probe_engine([Path("a"), Path("b")], hanging, seconds=2.0)
    assert seen.features == {"AVX"} and [f.path for f in seen.files] == ["a"]
    found = only(engine.check_engine(seen))
    assert found.status == "fail" and "did not answer within 2 s" in found.found


@pytest.mark.process
def test_the_engine_reports_its_build_and_errors_of_files(tmp_path: Path) -> None:
    whole, parts = write_tiny("llama", tmp_path), write_split(tmp_path, "parted")
    cut, page = tmp_path / "cut.gguf", tmp_path / "page.gguf"
    cut.write_bytes(whole.read_bytes()[:-1000])
    page.write_text("<html>")
    parts[1].unlink()
    seen = engine.probe_engine([whole, parts[0], cut, page, tmp_path / "none.gguf"])
    assert seen.failure == "" and seen.features & {"SSE3", "NEON"}
    assert next(iter(engine.check_engine(seen))).status == "ok"
    wrong = list(places.check_files(seen.files))
    assert [f.status for f in wrong] == ["fail"] * 4 and all(f.remedy for f in wrong)
    for finding, what in zip(
        wrong,
        ("is missing, one of the 3 parts", "is cut off", "not a GGUF file", "No such file"),
        strict=True,
    ):
        assert what in finding.found


@pytest.mark.process
def test_the_engines_and_files_of_graphs_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, page, text = (tmp_path / name for name in ("whole.onnx", "page.onnx", "text.tflite"))
    whole.write_bytes(onnx_graphs.affine())
    page.write_text("<html>")
    text.write_text("text")
    seen = engine.probe_engine([whole, page, text])
    assert seen.failure == "" and [bool(file.error) for file in seen.files] == [False, True, True]
    assert all("GGUF" not in finding.found for finding in places.check_files(seen.files))
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wrong = only(places.check_files(engine.probe_engine([whole]).files))
    assert "'onnx' cannot be used here" in wrong.found and wrong.remedy == install_command("onnx")


def test_an_engine_with_openmp_is_a_warning_with_a_build_command() -> None:
    report = engine.EngineReport(system_info="CPU : AVX = 1 | OPENMP = 1 |")
    found = only(engine.check_engine(report))
    assert found.status == "warn" and "5 % slower" in found.found
    assert "CMAKE_ARGS=-DGGML_OPENMP=OFF" in found.remedy
    assert only(engine.check_engine(ENGINE)).status == "ok"


def test_an_engine_whose_amx_code_crashes_is_a_warning_with_a_build_command() -> None:
    report = engine.EngineReport(system_info="CPU : AMX_INT8 = 1 |", broken_amx=True)
    found = only(engine.check_engine(report))
    assert found.status == "warn" and "AMX" in found.found
    assert "CXXFLAGS=-mno-amx-int8" in found.remedy


def test_unused_features_of_the_cpu_are_a_warning() -> None:
    same = only(engine.check_cpu(ENGINE, frozenset(("avx", "avx2", "fma"))))
    assert same.status == "ok" and "AVX, AVX2, FMA" in same.found
    slower = only(engine.check_cpu(ENGINE, frozenset(("avx", "avx2", "fma", "f16c", "avx512f"))))
    assert slower.status == "warn" and "without F16C, AVX512," in slower.found


def test_this_machines_cpu_is_read() -> None:
    assert engine.cpu_flags()


# GPUs.


@pytest.mark.parametrize(
    ("seen", "built", "status", "what"),
    [
        (engine.Gpus(), ENGINE, "ok", "none for computing"),
        (
            engine.Gpus(render=["/dev/dri/renderD128"]),
            ENGINE,
            "ok",
            "renderD128 is not used",
        ),
        (engine.Gpus(nvidia=["/dev/nvidia0"]), ENGINE, "warn", "GGML_CUDA"),
        (engine.Gpus(nvidia=["/dev/nvidia0"]), None, "warn", "GGML_CUDA"),
        (engine.Gpus(amd=["/dev/kfd"]), ENGINE, "warn", "GGML_HIP"),
        (engine.Gpus(), msgspec.structs.replace(ENGINE, gpu=True), "warn", "driver"),
        (
            engine.Gpus(nvidia=["/dev/nvidia0"], closed=["/dev/nvidia0"]),
            msgspec.structs.replace(ENGINE, gpu=True),
            "warn",
            "--gpu",
        ),
        (
            engine.Gpus(nvidia=["/dev/nvidia0"]),
            msgspec.structs.replace(ENGINE, gpu=True, devices=[Device("CUDA0", GIB, 2 * GIB)]),
            "ok",
            "CUDA0 with 1.07 GB of 2.15 GB free",
        ),
    ],
)
def test_gpus_and_the_build(
    seen: engine.Gpus, built: engine.EngineReport | None, status: str, what: str
) -> None:
    found = only(engine.check_gpus(seen, built))
    assert found.status == status and what in found.found + found.remedy


def test_devices_are_found_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "dri").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "kfd", "dri/renderD128", "dri/card0"):
        (tmp_path / name).touch()
    found = engine.find_gpus(tmp_path)
    assert found.nvidia == [f"{tmp_path}/nvidia0", f"{tmp_path}/nvidia1"]
    assert (found.amd, found.render) == ([f"{tmp_path}/kfd"], [f"{tmp_path}/dri/renderD128"])
    assert found.closed == []


# Configuration and folders.


def test_all_errors_of_the_configuration_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[daemon]\ncores = -1\nsesions-max = 1\n")
    found = only(settings.check_settings(settings.read_settings_facts(file, {})))
    assert found.status == "fail" and found.found.count("\n") == 1
    rest = settings.read_settings_facts(file, {"INFERD_SESSIONS_MAX": "7"}).config
    assert rest is not None and rest.sessions_max == 7, "the other checks go on with the rest"
    file.write_text("[daemon]\ncores = 1\n")
    seen = settings.read_settings_facts(file, {})
    assert only(settings.check_settings(seen)).status == "ok" and seen.config is not None


def test_missing_and_unreadable_models_are_findings(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    file = tmp_path / "c.toml"
    file.write_text(
        "[models.gone]\nfile = 'gone.gguf'\n[models.gone.adapters]\nstyle = 'style.gguf'\n"
    )
    asked = load_config({"config": file, "models-dir": folder}, {})
    found = {f.status: f for f in places.check_models(places.inspect_models(asked, own_account()))}
    assert "does not exist" in found["warn"].found and "inferd pull" in found["warn"].remedy
    folder.mkdir()
    empty = list(places.check_models(places.inspect_models(asked, own_account())))
    assert [f.status for f in empty] == ["fail", "fail", "warn"]
    assert "[models.gone]: " in empty[0].found and "adapters.style" in empty[1].found
    write_tiny("llama", folder)
    seen = places.inspect_models(config(models_dir=folder), own_account())
    assert seen.smallest == ("tiny-llama", (folder / "tiny-llama.gguf").stat().st_size)
    assert only(places.check_models(seen)).found.startswith("1 found, ")
    closed = msgspec.structs.replace(seen, account=ADA, unreadable={"/m/x.gguf": "/m/x.gguf"})
    assert "ada may not read /m/x.gguf" in only(places.check_models(closed)).found
    shut = msgspec.structs.replace(seen, files={}, denied_at="/var/lib/inferd")
    assert "access is denied at /var/lib/inferd" in only(places.check_models(shut)).found


def test_projectors_that_do_not_fit_are_findings(tmp_path: Path) -> None:
    write_pair("mlp", tmp_path)
    file = tmp_path / "c.toml"
    file.write_text("[models.named]\nfile = 'tiny-llama.gguf'\nmmproj = 'narrow.gguf'\n")
    write_projector("mlp", tmp_path, width=32).rename(tmp_path / "narrow.gguf")
    write_projector("mlp", tmp_path)
    asked = load_config({"config": file, "models-dir": tmp_path}, {})
    seen = places.inspect_models(asked, own_account())
    bad, good = engine.check_media(ENGINE, seen.projectors)
    assert bad.status == "fail" and "embeddings of 32 numbers" in bad.found and bad.remedy
    assert good.status == "ok" and "tiny-llama by mmproj-tiny-mlp.gguf" in good.found
    write_projector("mlp", tmp_path, width=32)
    seen = places.inspect_models(config(models_dir=tmp_path), own_account())
    left_out = next(iter(engine.check_media(ENGINE, seen.projectors)))
    assert left_out.status == "warn" and "is left out: " in left_out.found
    assert "no model has a projector" in only(engine.check_media(ENGINE, {})).found
    absent = msgspec.structs.replace(ENGINE, media_failure="libmtmd.so is missing")
    lacking = only(engine.check_media(absent, {}))
    assert lacking.status == "warn" and "libmtmd.so is missing" in lacking.found
    assert list(engine.check_media(engine.EngineReport(), {})) == []


def test_draft_models_that_do_not_fit_are_findings(tmp_path: Path) -> None:
    for kind in ("llama", "gemma3"):
        write_tiny(kind, tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(80))
    file = tmp_path / "c.toml"
    drafts = {"tiny-llama": "tiny-gemma3", "b": "nobody", "c": "broken.gguf", "d": "tiny-gemma3"}
    file.write_text(
        "\n".join(
            f"[models.{name}]\nfile = 'tiny-llama.gguf'\ndraft-model = '{draft}'"
            for name, draft in drafts.items()
        )
    )
    asked = load_config({"config": file, "models-dir": tmp_path}, {})
    seen = places.inspect_models(asked, own_account())
    found = {f.found.split()[0].rstrip(":"): f for f in places.check_models(seen)}
    assert found["tiny-llama"].status == found["d"].status == "ok"
    assert "tiny-gemma3 drafts for it, and takes " in found["d"].found
    assert found["b"].status == found["c"].status == "fail" and found["b"].remedy
    assert "there is no model of this name" in found["b"].found


def test_models_without_the_nextn_layers_that_they_request_are_findings(tmp_path: Path) -> None:
    for kind in ("llama", "nextn"):
        write_tiny(kind, tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(80))
    files = {"a": "tiny-nextn.gguf", "b": "tiny-llama.gguf", "c": "broken.gguf"}
    file = tmp_path / "c.toml"
    file.write_text(
        "\n".join(f"[models.{n}]\nfile = '{f}'\nspeculation = 'mtp'" for n, f in files.items())
    )
    asked = load_config({"config": file, "models-dir": tmp_path}, {})
    seen = places.inspect_models(asked, own_account())
    found = {f.found.split()[0]: f for f in places.check_models(seen) if "NextN" in f.found}
    assert found["a"].status == "ok" and set(found) == set(files)
    assert found["b"].status == found["c"].status == "fail" and found["b"].remedy
    assert found["b"].found == "b cannot draft with NextN layers: it has none"


def test_links_that_lead_nowhere_are_findings(tmp_path: Path) -> None:
    (tmp_path / "gone.gguf").symlink_to("/none/gone.gguf")
    (tmp_path / "other").symlink_to("/none")
    (tmp_path / "ring.gguf").symlink_to("ring.gguf")
    (tmp_path / "knot").symlink_to("knot")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "up").symlink_to("..")
    (tmp_path / ".hidden").symlink_to("/none")
    seen = places.inspect_models(config(models_dir=tmp_path), own_account())
    found = [f.found.replace(" is not offered as a model", "") for f in places.check_models(seen)]
    assert found[:-1] == [
        "gone.gguf: it is a link to a missing file",
        "knot: it is a link that leads to itself",
        "other: it is a link to a missing file",
        "ring.gguf: it is a link that leads to itself",
        "sub/up/: it is a link that leads back to ./",
    ]


def test_missing_parts_of_a_split_model_are_findings(tmp_path: Path) -> None:
    parts = write_split(tmp_path, "split")
    asked = config(models_dir=tmp_path)
    assert places.inspect_models(asked, own_account()).missing_parts == []
    parts[1].unlink()
    seen = places.inspect_models(asked, own_account())
    [found] = [f for f in places.check_models(seen) if f.status == "fail"]
    lacking = f"1 of its {len(parts)} parts is missing: {parts[1].name}"
    assert found.found == f"split: {lacking}"
    (tmp_path / "many-00007-of-00009.gguf").touch()
    many, _ = places.inspect_models(asked, own_account()).missing_parts
    assert "8 of its 9 parts are missing: many-00001-of-00009.gguf, " in many
    assert many.endswith("many-00003-of-00009.gguf and 5 more")


@pytest.fixture
def closed_folder() -> Iterator[Path]:
    """A models directory in a folder that only root can search."""
    top = Path(tempfile.mkdtemp(prefix="inferd-"))  # unlike in pytest's folders
    models = top / "closed" / "models"
    models.mkdir(parents=True)
    top.chmod(0o711)
    models.parent.chmod(0o700)
    yield models
    shutil.rmtree(top)


def test_a_folder_that_may_not_be_read_is_not_a_missing_one(closed_folder: Path) -> None:
    file = closed_folder / "m.gguf"
    asked = config(models_dir=closed_folder, state_dir=closed_folder)
    with as_user(ADA.uid):
        seen = places.inspect_models(asked, own_account())
        found = only(places.check_models(seen))
        assert found.status == "fail"
        assert f"access is denied at {closed_folder.parent}" in found.found
        other = Account("inferd", BOB, frozenset((BOB,)))
        for inspect in (places.inspect_models, places.inspect_state_folder):
            with pytest.raises(PermissionError, match=str(closed_folder)):
                inspect(asked, other)
        lines = missing_files({"m": ModelConfig(file=file)}, [])
        assert lines == [f"[models.m]: {file} is in a folder that may not be read"]


@pytest.mark.parametrize(
    ("daemon", "caller", "command"),
    [
        (1001, 1001, "inferd pull smollm2"),
        (998, 1001, "sudo inferd pull smollm2"),
        (998, 0, "inferd pull smollm2"),
        (0, 0, "inferd pull smollm2"),
    ],
)
def test_the_remedy_is_the_command_for_its_caller(daemon: int, caller: int, command: str) -> None:
    own = Path("/home/ada/models")
    assert places.pull_command(daemon, caller, own, own) == command
    elsewhere = places.pull_command(1001, 1001, Path("/a folder"), own)
    assert elsewhere == "inferd pull smollm2 --models-dir '/a folder'"


def test_files_that_are_not_offered_are_findings(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    write_lora(tmp_path / "style.gguf", {})
    (tmp_path / "page.gguf").write_text("<html>")
    for name in ("a b.gguf", "a:b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    seen = places.inspect_models(config(models_dir=tmp_path), own_account())
    assert [*seen.files] == ["tiny-llama"]
    *warnings, good = places.check_models(seen)
    assert [w.status for w in warnings] == ["warn"] * 3
    for warning, file, reason in zip(
        warnings,
        ("a b.gguf", "a:b.gguf", "page.gguf"),
        ("also that of a:b.gguf", "also that of a b.gguf", "a web page"),
        strict=True,
    ):
        assert warning.found.startswith(f"{file} is not offered as a model: ")
        assert reason in warning.found and "inferd models --all" in warning.remedy
    assert good.status == "ok" and good.found.startswith("1 found, ")
    assert "style.gguf is not offered: it is an adapter (LoRA)" in good.found


def test_the_state_is_private_and_has_disk_space(tmp_path: Path) -> None:
    asked = config(state_dir=tmp_path / "state" / "inferd")
    seen = places.inspect_state_folder(asked, own_account())
    roomy = msgspec.structs.replace(seen, free_bytes=100 * GIB)
    assert only(places.check_state(roomy)).status == "ok", "it can be made"
    (tmp_path / "state" / "inferd").mkdir(parents=True)
    journal = tmp_path / "state" / "inferd" / "sessions.db"
    journal.touch(mode=0o644)
    journal.chmod(0o644)
    seen = places.inspect_state_folder(asked, own_account())
    seen = msgspec.structs.replace(seen, free_bytes=100 * GIB)
    found = only(places.check_state(seen))
    assert found.status == "fail" and found.remedy == f"chmod 600 {journal}"
    full = msgspec.structs.replace(roomy, free_bytes=1000)
    assert only(places.check_state(full)).status == "warn"
    shut = msgspec.structs.replace(roomy, account=ADA, denied_at="/var/lib")
    assert "ada may not write" in only(places.check_state(shut)).found
    fixed = msgspec.structs.replace(roomy, read_only=True)
    assert "read-only" in only(places.check_state(fixed)).found


# The machine.


@pytest.mark.parametrize(
    ("changes", "flags", "status", "what"),
    [
        ({}, {}, "ok", "are free for models"),
        ({"swapped_bytes": GIB, "total_bytes": 9 * GIB}, {}, "ok", "limit of its cgroup; 1.07 GB"),
        ({"free_bytes": GIB // 2}, {}, "fail", "the smallest model file, tiny, has 1.07 GB"),
        ({"stalled_percent": 42.0}, {}, "warn", "42 % of the last minute"),
        ({}, {"memory-bytes": 17 * GIB}, "warn", "lower it"),
    ],
)
def test_memory(
    changes: dict[str, object], flags: dict[str, object], status: str, what: str
) -> None:
    models = places.Models(Path("/m"), ADA, True, sizes={"tiny": GIB, "large": 9 * GIB, "none": 0})
    seen = msgspec.structs.replace(MACHINE, **changes)
    found = only(machine.check_memory(seen, models, config(**flags)))
    assert found.status == status and what in found.found + found.remedy


def test_memory_of_loaded_models_counts_as_available() -> None:
    models = places.Models(Path("/m"), ADA, True, sizes={"tiny": GIB})
    full = msgspec.structs.replace(MACHINE, free_bytes=0)
    assert only(machine.check_memory(full, models, config())).status == "fail"
    assert only(machine.check_memory(full, models, config(), ["tiny"])).status == "ok"


def test_limits_cores_and_users() -> None:
    def changed(**changes: object) -> machine.Machine:
        return msgspec.structs.replace(MACHINE, **changes)

    asked = config(cores=8)
    few = only(machine.check_limits(changed(files_max=200), asked))
    assert few.status == "fail" and "LimitNOFILE" in few.remedy
    assert only(machine.check_limits(MACHINE, asked)).status == "ok"
    unreported = only(machine.check_limits(changed(stalled_percent=None), asked))
    assert unreported.status == "warn" and "psi=1" in unreported.remedy
    assert only(machine.check_cores(MACHINE, asked)).status == "warn"
    assert only(machine.check_cores(MACHINE, config(cores=2))).status == "ok"
    assert only(machine.check_users(MACHINE)).status == "ok"
    alone = only(machine.check_users(changed(has_distinct_users=False)))
    assert alone.status == "warn" and "PrivateUsers=" in alone.remedy


def test_this_machine_and_the_daemons_own_limit_are_read(tmp_path: Path) -> None:
    seen = machine.inspect_machine(os.getpid())
    assert 0 < seen.free_bytes <= seen.total_bytes <= seen.memory_bytes
    assert seen.files_max > 0 and 1 <= seen.cores_usable <= seen.cores
    (tmp_path / "7").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    (tmp_path / "7" / "limits").write_text("Max open files            512      4096     files\n")
    (tmp_path / "7" / "cmdline").write_text("python3\0-m\0inferd\0serve")
    bare = machine.inspect_machine(7, tmp_path, tmp_path)
    assert (bare.memory_bytes, bare.files_max) == (4000 * 1024, 4096)
    assert bare.stalled_percent is None and bare.has_distinct_users
    (tmp_path / "7" / "cmdline").write_text("bash")
    assert machine.inspect_machine(7, tmp_path, tmp_path).files_max == 0, "not the daemon"


# The daemon.


@pytest.mark.parametrize(
    ("changes", "status", "what"),
    [
        ({}, "ok", "root:inferd 660"),
        ({"exists": False}, "warn", "inferd start"),
        ({"is_socket": False}, "fail", "is not a socket"),
        ({"error": "ECONNREFUSED"}, "warn", "takes it over"),
        ({"error": "EACCES"}, "fail", "usermod -aG inferd"),
        ({"error": "EACCES", "joined": True}, "fail", "log in again"),
        ({"error": "EACCES", "mode": 0o600}, "fail", "only its owner may connect"),
        ({"error": "EACCES", "group": "root"}, "fail", "only its owner may connect"),
        ({"error": "EAGAIN"}, "fail", "hangs"),
        ({"error": "ENOTSOCK"}, "fail", "ENOTSOCK"),
        ({"mode": 0o666}, "warn", "open to every user"),
    ],
)
def test_a_socket(changes: dict[str, object], status: str, what: str) -> None:
    found = only(reach.check_socket(msgspec.structs.replace(REACH, **changes)))
    assert found.status == status and what in found.found + found.remedy


COMPONENT = {"component": "metrics", "up": False, "effect": "m", "cause": "c", "remedy": "free it"}


@pytest.mark.parametrize(
    ("changes", "status", "what"),
    [
        ({}, "ok", "answers, pid 7"),
        ({"software": "inferd/0.0.1"}, "warn", "the daemon is inferd/0.0.1"),
        ({"llama_commit": "0000"}, "warn", "llama.cpp 0000"),
        ({"stats": {"components": [COMPONENT]}}, "warn", "metrics fails: m: c"),
        ({"stats": {"pending_restart": ["cores"]}}, "warn", "not in force before a restart: cores"),
        ({"stats": {"draining": True}}, "warn", "is draining"),
        ({"software": "", "refusal": "no", "hint": "do"}, "fail", "no"),
    ],
)
def test_a_daemon(changes: dict[str, object], status: str, what: str) -> None:
    found = only(reach.check_daemon(msgspec.structs.replace(REACH, **changes)))
    assert found.status == status and what in found.found


# The service.


def installed(root: Path, *, user: bool = False) -> Service:
    """Write the units of a service whose program exists."""
    service = Service(user=user, root=root)
    program = root / "opt/inferd"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.touch(mode=0o755)
    for step in install_plan(service, "/opt/inferd"):
        if isinstance(step, Write):
            step.path.parent.mkdir(parents=True, exist_ok=True)
            step.path.write_text(step.text)
    return service


def test_a_service_is_found_by_its_socket_with_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/ada/.config")
    installed(tmp_path)
    seen = units.find_units(Path("/run/inferd/inferd.sock"), {}, tmp_path)
    assert seen is not None and not seen.user
    assert seen.environment["INFERD_STATE_DIR"] == "/var/lib/inferd"
    assert (seen.outdated, seen.missing_program) == ([], "")
    assert units.find_units(Path("/run/user/1/inferd/inferd.sock"), {}, tmp_path) is None
    assert units.machine_socket(tmp_path) == Path("/run/inferd/inferd.sock")
    assert units.machine_socket(tmp_path / "none") is None
    installed(tmp_path, user=True)
    environ = {"XDG_RUNTIME_DIR": "/run/user/1"}
    own = units.find_units(Path("/run/user/1/inferd/inferd.sock"), environ, tmp_path)
    assert own is not None and own.user and own.account == own_account()


def test_changed_units_are_a_finding(tmp_path: Path) -> None:
    def check() -> Finding:
        seen = units.find_units(Path("/run/inferd/inferd.sock"), {}, tmp_path)
        assert seen is not None
        return only(units.check_units(msgspec.structs.replace(seen, account=ADA)))

    service = installed(tmp_path)
    unit = service.units / "inferd.service"
    assert check().found == "the machine's, as the user ada; its units are up to date"
    drop_in = service.units / "inferd.service.d" / "own.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nPrivateUsers=yes\n")
    found = check()
    assert found.status == "fail" and "PrivateUsers= is on" in found.found
    drop_in.write_text("[Service]\nPrivateUsers=no\n")
    assert check().status == "ok"
    text = unit.read_text()
    unit.write_text(text.replace("WatchdogSec=30", "WatchdogSec=3"))
    assert check().status == "warn" and str(unit) in check().found
    unit.write_text(text)
    (tmp_path / "opt/inferd").unlink()
    assert check().status == "fail" and "/opt/inferd, which cannot be run" in check().found


def test_a_service_without_its_user_or_that_failed() -> None:
    seen = units.Units(user=False, directives={"User": ["inferd"]}, outdated=[], account=ADA)
    assert only(units.check_units(seen)).status == "ok"
    nobody = only(units.check_units(msgspec.structs.replace(seen, account=None)))
    assert nobody.status == "fail" and "sudo inferd install-service" in nobody.remedy
    state = {"ActiveState": "failed", "Result": "oom-kill", "NRestarts": "3"}
    failed = only(units.check_units(msgspec.structs.replace(seen, state=state)))
    assert failed.status == "fail" and "oom-kill" in failed.found
    assert only(units.check_units(None)).status == "ok"


def test_signals_have_names() -> None:
    assert engine._failure_of(-signal.SIGKILL, b"") == "it ends by SIGKILL"


def test_a_model_whose_path_cannot_be_checked_is_missing(tmp_path: Path) -> None:
    file = tmp_path / ("x" * 300)  # ENAMETOOLONG
    models = {"long": ModelConfig(file=file)}
    assert missing_files(models, []) == [f"[models.long]: {file} does not exist"]


def test_options_of_the_engine_are_listed_with_their_effect(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(9 << 20))

    def found(options: dict[str, object], defaults: dict[str, object] | None = None) -> Finding:
        model = ModelConfig(file=file, options=options)
        config = replace(load_config({}, {}), models={"m": model}, defaults=defaults or {})
        return only(check_engine_options(config, MACHINE))

    both: dict[str, object] = {"cache-type-k": "q8_0", "cache-type-v": "q8_0"}
    assert "m: KV states in q8_0 and q8_0 save 47% of those in f16" in found(both).found
    assert "swa-full True (layers with a window" in found({"swa-full": True}).found
    locked = found({"mlock": True})
    assert locked.status == "warn" and "LimitMEMLOCK" in locked.remedy
    wrong = found({"cache-type-v": "q4_0"}, {"flash-attn": "off"})
    assert wrong.status == "fail" and "needs flash attention" in wrong.found
    plain = replace(load_config({}, {}), models={"m": ModelConfig(file=file)})
    assert list(check_engine_options(plain, MACHINE)) == []


def test_measured_settings_are_listed_or_else_the_rule_for_the_cpu(tmp_path: Path) -> None:
    config = replace(load_config({}, {}), state_dir=tmp_path, cores=2)

    def found() -> list[Finding]:
        inspected = inspect_tuned_settings(config)
        return [] if inspected is None else list(check_tuned_settings(inspected))

    (rule,) = found()
    assert rule.status == "ok" and "no measured settings, a model is measured" in rule.found
    shape = ModelShape(
        architecture="llama", layers=30, embedding=576, heads=9, kv_heads=3, head_k=64, head_v=64,
        size_bytes=9,
    )  # fmt: skip
    record = TuningRecord(
        shape=shape, cpu=this_cpu(2).key, build=LLAMA_COMMIT, chosen=Setting(True), reason="0.9"
    )
    records = TuningRecords(tmp_path)
    records.store(replace_fields(record, build="another"))
    assert found() == [rule]
    records.store(record)
    (measured,) = found()
    assert measured.found == "llama with 30 layers of 576: flash attention on, measured: 0.9"
    (tmp_path / TUNING_FILE).write_text("{")
    damaged, again = found()
    assert damaged.status == "warn" and "delete it" in damaged.remedy and again == rule
