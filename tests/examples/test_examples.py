"""The examples run unchanged, and the guide shows them verbatim."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import wave
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.fork_server import ForkedProcess
from tests.models import ONE_THREAD, magika, smollm2
from tests.small_gemma import small_gemma3
from tools.get_graphs import MISSING, basic_pitch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GUIDE = (ROOT / "docs" / "guide.md").read_text()
LINES_MAX = 40
STARTS: tuple[type[subprocess.Popen[bytes]], ...] = (subprocess.Popen, ForkedProcess)
"""Starts of an example's first run, by a new interpreter, and of its second."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    assert basic_pitch() is not None, MISSING
    config = f"""{ONE_THREAD}
[models.smollm2]\nfile = "{smollm2()}"\nslots = 1\nctx-size = 1024
[models.other]\nbackend = "echo"
[models.magika]\nfile = "{magika()}"\nthreads = 1
[models.basic-pitch]\nfile = "{basic_pitch()}/nmp.onnx"\nthreads = 1\n"""
    with running_daemon(config) as running:
        yield running


def run(
    daemon: RunningDaemon,
    example: Path,
    *arguments: str,
    start: type[subprocess.Popen[bytes]] = subprocess.Popen,
) -> str:
    """Run an example as a separate program and return its output."""
    process = start(
        [sys.executable, str(example), *arguments],
        env=daemon.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        output, errors = (text.decode() for text in process.communicate(timeout=280))
    assert (process.returncode, errors) == (0, "")
    return output


def test_there_are_eighteen_examples_of_at_most_forty_lines() -> None:
    assert len(EXAMPLES) == 18
    for example in EXAMPLES:
        assert len(example.read_text().splitlines()) <= LINES_MAX, example.name


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.stem)
def test_an_example_runs_again_on_another_model_and_leaves_nothing_behind(
    daemon: RunningDaemon, example: Path
) -> None:
    for model, start in zip(("echo", "other"), STARTS, strict=True):
        assert run(daemon, example, model, start=start).strip()
        with Client(daemon.socket) as client:
            assert not client.queue() and not client.sessions(dormant=True)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_first_session_runs_on_a_real_model_by_default(daemon: RunningDaemon) -> None:
    answer = run(daemon, ROOT / "examples" / "first_session.py")
    assert len(answer.split()) > 8 and "the capital of France?" not in answer


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "expected"), [("tools", "call: "), ("json_schema", "Oslo")])
def test_grammars_hold_on_a_real_model(daemon: RunningDaemon, example: str, expected: str) -> None:
    assert run(daemon, ROOT / "examples" / f"{example}.py").startswith(expected)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_two_real_models_identify_a_file_and_explain_it(daemon: RunningDaemon) -> None:
    example = ROOT / "examples" / "identify_file.py"
    first, *answer = run(daemon, example).splitlines()
    assert first.startswith("identify_file.py: python (") and len(" ".join(answer).split()) > 5
    page = run(daemon, example, "echo", str(ROOT / "docs" / "dashboard.json"))
    assert page.startswith("dashboard.json: json (")


@pytest.mark.model
@pytest.mark.timeout(300)
def test_two_real_models_find_notes_and_explain_them(daemon: RunningDaemon, tmp_path: Path) -> None:
    example = ROOT / "examples" / "find_notes.py"
    first, *answer = run(daemon, example).splitlines()
    assert first == "notes: A3 C#4 E4" and len(" ".join(answer).split()) > 5
    with wave.open(str(tmp_path / "a.wav"), "wb") as sound:  # three seconds of one note
        sound.setparams((1, 2, 22_050, 0, "NONE", ""))
        values = (round(9000 * math.sin(math.tau * 440 * n / 22_050)) for n in range(3 * 22_050))
        sound.writeframes(array("h", values).tobytes())
    assert run(daemon, example, "echo", str(tmp_path / "a.wav")).startswith("notes: A4\n")


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_chain_on_real_models_finds_the_passages_and_computes_no_history_again() -> None:
    config = f"""[daemon]\nmemory-bytes = 300000000\n{ONE_THREAD}slots = 1\nctx-size = 512
[models.smollm2]\nfile = "{smollm2()}"\n[models.gemma3-270m-base]\nfile = "{small_gemma3()}"\n"""
    with running_daemon(config) as small:
        lines = run(small, ROOT / "examples" / "chain.py").splitlines()
        log = small.log
    assert "the library is open from nine" in lines[0].lower() and "behind" in lines[1].lower()
    assert lines[0].endswith("reused: [0, 0]")
    answers, notes = (int(n) for n in lines[1].rpartition("[")[2].strip("]").split(","))
    assert answers > 60 and notes > 40
    assert log.count("model.evicted") == 4, "memory fits one of the two models"


def shown() -> dict[str, str]:
    """Return the guide's code by the name of its file."""
    return dict(re.findall(r"^`examples/(\w+)\.py`:\n\n```python\n(.*?)```$", GUIDE, re.M | re.S))


def test_the_guide_shows_each_example_verbatim() -> None:
    assert shown() == {example.stem: example.read_text() for example in EXAMPLES}


def test_the_guides_test_passes() -> None:
    code = GUIDE.split("## In tests of your own")[1].split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    test = names["test_my_program_talks_to_a_model"]
    assert callable(test)
    test()
