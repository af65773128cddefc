"""Adapters in the engine, on a tiny llama.cpp model: every task answers as it does alone, and
states of other adapters never serve it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inferd.backends import AdapterInfo, AdapterSpec, SamplingParams
from inferd.backends.llama.model import LlamaModel
from inferd.backends.model_spec import adapter_key
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.kv.disk import KvFiles
from inferd.scheduler.worker import load_adapters
from tests.backends import tiny as tiny_models
from tests.scheduler.doubles import Bench
from tests.scheduler.kv.test_kv_reuse import settle
from tests.tiny_lora import lora

GREEDY = SamplingParams(temp=0)
PREFIX = "what all of these prompts have in common, and it is long enough to be worth something: "
SETTINGS = EngineSettings(quantum_tokens=6, shared_prefix_tokens_min=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    model = tiny_models.load_tiny("llama", tmp_path_factory.mktemp("tiny"))
    yield model
    model.close()


@pytest.fixture(scope="module")
def sets(model: LlamaModel, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, ...]]:
    """Return four combinations of two adapters, one of them without any."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = [lora(folder / f"{seed}.gguf", seed) for seed in (1, 2)]
    specs = [AdapterSpec(name=path.stem, path=str(path)) for path in paths]
    reports = load_adapters(model, specs)
    a, b = (report.info.id for report in reports if report.info is not None)
    both = sorted((adapter_key(a, 0.5), adapter_key(b, 0.8)))
    return [(), (adapter_key(a, 1.0),), (adapter_key(b, 1.0),), tuple(both)]


def bench_of(
    model: LlamaModel, settings: EngineSettings = SETTINGS, files: KvFiles | None = None
) -> Bench:
    """Return an engine on a model whose slots are empty."""
    for slot in range(model.info.slots):
        model.trim(slot, 0)
    model.set_adapters(())
    bench = Bench()
    bench.model = model  # type: ignore[assignment]
    bench.engine = Engine(model, settings, lambda: bench.now, files)
    return bench


def ask(
    bench: Bench, number: int, text: str, adapters: tuple[str, ...], **fields: object
) -> m.Submit:
    values = {"sampling": GREEDY, "n_predict": 24, "adapters": adapters, **fields}
    return bench.submit(number, text, **values)


def alone(model: LlamaModel, text: str, adapters: tuple[str, ...]) -> list[int]:
    bench = bench_of(model)
    bench.run(ask(bench, 1, text, adapters))
    return bench.tokens(1)


def test_tasks_of_four_adapter_sets_answer_as_they_do_alone(
    model: LlamaModel, sets: list[tuple[str, ...]]
) -> None:
    texts = {i: f"{PREFIX}{i}" for i in range(12)}
    expected = {i: alone(model, text, sets[i % 4]) for i, text in texts.items()}
    assert len({tuple(alone(model, PREFIX, adapters)) for adapters in sets}) == 4, "no effect"
    bench = bench_of(model)

    bench.run(*(ask(bench, i, text, sets[i % 4]) for i, text in texts.items()))

    assert {i: bench.tokens(i) for i in texts} == expected
    assert sum(bench.stats(i).parks for i in texts) > 0, "none was parked and restored"
    assert sum(bench.stats(i).cached_tokens for i in texts) > 0, "none shared its prefix"


def test_a_state_serves_only_its_own_adapter_set_in_memory_and_on_disk(
    model: LlamaModel, sets: list[tuple[str, ...]], tmp_path: Path
) -> None:
    files = KvFiles(tmp_path, model.info.fingerprint)
    bench = bench_of(model, files=files)
    _, one, two, _ = sets
    bench.run(ask(bench, 1, PREFIX, one, session="a", persist=True))
    bench.run(ask(bench, 2, PREFIX, two), ask(bench, 3, PREFIX, ()))
    bench.run(ask(bench, 4, PREFIX, one))
    assert [bench.stats(i).cached_tokens > 0 for i in (1, 2, 3, 4)] == [False, False, False, True]
    bench.engine.kv.close()

    again = KvFiles(tmp_path, model.info.fingerprint)
    bench = bench_of(model, files=again)
    bench.run(ask(bench, 1, PREFIX, two), ask(bench, 2, PREFIX, ()))
    bench.iterate(ask(bench, 3, PREFIX, one))
    settle(bench, again)

    cached = [bench.stats(i).cached_tokens for i in (1, 2, 3)]
    assert cached[:2] == [0, 0] and cached[2] > 0, (
        "the file was not found, or was found for another adapter set"
    )
    assert bench.tokens(3) == alone(model, PREFIX, one)
    again.close()


def test_an_adapter_is_added_and_removed_while_others_are_computed(
    model: LlamaModel, sets: list[tuple[str, ...]], tmp_path: Path
) -> None:
    text, plain = "a text", sets[0]
    path = lora(tmp_path / "new.gguf", 3)
    spec = AdapterSpec(name="new", path=str(path))
    bench = bench_of(model)
    bench.iterate(ask(bench, 1, text, plain), m.AddAdapter(7, spec))
    [answer] = [r for r in bench.iterate(m.AddAdapter(8, spec)) if isinstance(r, m.CommandResult)]
    info = msgspec.convert(answer.value, AdapterInfo)
    key = (adapter_key(info.id, 1.0),)
    bench.iterate(ask(bench, 2, text, key, n_predict=60), ask(bench, 3, text, key, n_predict=60))

    refused = bench.iterate(m.RemoveAdapter(9, info.id, force=False))
    assert [r.error["name"] for r in refused if isinstance(r, m.Refused)] == ["Busy"]
    bench.run(m.Cancel(3))
    assert bench.tokens(1) == alone(model, text, plain)

    bench = bench_of(model)
    bench.iterate(ask(bench, 4, text, key, n_predict=200), ask(bench, 5, text, plain))
    bench.iterate()
    bench.iterate(m.RemoveAdapter(10, info.id, force=True))
    assert bench.error(4) == "Cancelled"
    bench.run(ask(bench, 6, text, key))
    assert bench.error(6) == "InvalidArgument"
    assert bench.tokens(5) == alone(model, text, plain)


def test_an_incompatible_adapter_is_reported_and_the_others_are_loaded(
    model: LlamaModel, tmp_path: Path
) -> None:
    good, bad = lora(tmp_path / "good.gguf", 4), tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    specs = [AdapterSpec(name=path.stem, path=str(path)) for path in (bad, good)]

    reports = {report.spec.name: report for report in load_adapters(model, specs)}

    assert reports["bad"].info is None
    error = reports["bad"].error
    assert error is not None and error["name"] == "LoadFailed" and error["hint"]
    assert reports["good"].info is not None and reports["good"].error is None
    bench = bench_of(model)
    refused = bench.iterate(m.AddAdapter(1, specs[0]))
    assert [r.error["name"] for r in refused if isinstance(r, m.Refused)] == ["LoadFailed"]
