"""The quarantine: inputs that are refused to their owners, and for how long."""

from __future__ import annotations

from msgspec.structs import replace

from inferd.backends import SamplingParams
from inferd.backends.errors import QuotaExceeded, WorkerCrashed
from inferd.daemon.workers.deaths import (
    BAN_S,
    INPUTS_MAX,
    OWNERS_MAX,
    QUARANTINE_S,
    SUSPECT_S,
    VERDICTS_MAX,
    Quarantine,
)
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Priority

GRAMMAR = SamplingParams(grammar='root ::= "x"')


class Scene:
    def __init__(self) -> None:
        self.now = 0.0
        self.quarantine = Quarantine(lambda: self.now)

    def refusal(self, spec: m.TaskSpec) -> str | None:
        error = self.quarantine.refusal_of_task("m", spec)
        return None if error is None else error.name

    def text_refusal(self, owner: int, text: bytes) -> str | None:
        error = self.quarantine.refusal_of_text("m", owner, text)
        return None if error is None else error.name


def task(text: str = "known", owner: int = 1, **fields: object) -> m.TaskSpec:
    spec = m.TaskSpec(id=7, owner=Owner(owner), tokens=text.encode(), sampling=SamplingParams())
    return replace(spec, **fields)


def test_the_same_task_of_another_user_is_not_refused() -> None:
    scene = Scene()
    scene.quarantine.add_task(task(), while_sampling=False)
    assert scene.refusal(task()) == WorkerCrashed.name
    assert scene.refusal(task(owner=2)) is None


def test_a_known_prompt_without_the_killing_grammar_is_not_refused() -> None:
    scene = Scene()
    scene.quarantine.add_task(task(sampling=GRAMMAR), while_sampling=False)
    assert scene.refusal(task(sampling=GRAMMAR)) == WorkerCrashed.name
    assert scene.refusal(task()) is None
    assert scene.refusal(task(adapters=("loud",), sampling=GRAMMAR)) is None
    assert scene.refusal(task("another", sampling=GRAMMAR)) is None


def test_a_grammar_that_kills_while_it_is_sampled_is_refused_under_any_prompt() -> None:
    scene = Scene()
    scene.quarantine.add_task(task(sampling=GRAMMAR), while_sampling=True)
    warmer = replace(GRAMMAR, temp=1.5)
    assert scene.refusal(task("another", sampling=warmer)) == WorkerCrashed.name
    assert scene.refusal(task("another", owner=2, sampling=warmer)) is None
    assert scene.refusal(task("another")) is None


def test_neither_the_seed_nor_the_reader_matters() -> None:
    scene = Scene()
    scene.quarantine.add_task(task(), while_sampling=False)
    same = task(
        id=8,
        sampling=SamplingParams(seed=5),
        priority=Priority.HIGH,
        pull=True,
        credit=3,
        session="s",
        request="2.1",
        total_timeout_s=1.0,
    )
    assert scene.refusal(same) == WorkerCrashed.name


def test_a_text_is_refused_to_its_owner_for_an_hour() -> None:
    scene = Scene()
    scene.quarantine.add_text(1, b"bad")
    assert scene.text_refusal(1, b"bad") == WorkerCrashed.name
    assert scene.text_refusal(1, b"good") is None
    assert scene.text_refusal(2, b"bad") is None
    scene.now += QUARANTINE_S
    assert scene.text_refusal(1, b"bad") is None


def test_three_verdicts_within_an_hour_exclude_the_owner_for_ten_minutes() -> None:
    scene = Scene()
    for number in range(VERDICTS_MAX):
        assert scene.refusal(task("other")) is None
        scene.now += 60.0
        scene.quarantine.add_task(task(str(number)), while_sampling=False)
    error = scene.quarantine.refusal_of_task("m", task("other"))
    assert isinstance(error, QuotaExceeded) and error.retry_after_s == BAN_S
    assert scene.text_refusal(1, b"any") == QuotaExceeded.name
    assert scene.refusal(task("other", owner=2)) is None
    scene.now += BAN_S
    assert scene.refusal(task("other")) is None
    scene.quarantine.add_text(1, b"bad")
    assert scene.refusal(task("other")) == QuotaExceeded.name, "the fourth one within the hour"


def test_three_verdicts_in_more_than_an_hour_do_not() -> None:
    scene = Scene()
    for number in range(2 * VERDICTS_MAX):
        scene.quarantine.add_task(task(str(number)), while_sampling=False)
        assert scene.refusal(task("other")) is None
        scene.now += QUARANTINE_S / 2


def test_it_is_bounded_by_owner_and_in_all() -> None:
    scene = Scene()
    for number in range(INPUTS_MAX + 1):
        scene.now += QUARANTINE_S / 100
        scene.quarantine.add_text(1, str(number).encode())
    scene.now += BAN_S
    assert scene.text_refusal(1, b"0") is None
    assert scene.text_refusal(1, b"1") == WorkerCrashed.name
    for owner in range(2, OWNERS_MAX + 2):
        scene.quarantine.add_text(owner, b"bad")
    assert scene.text_refusal(1, b"1") is None
    assert scene.text_refusal(2, b"bad") == WorkerCrashed.name


def test_a_suspect_computes_alone_for_a_while_and_gets_channels_again_after_that() -> None:
    scene = Scene()
    scene.quarantine.add_suspect(1)
    assert scene.quarantine.is_suspect(1) and not scene.quarantine.trusts(1)
    assert not scene.quarantine.is_suspect(2) and scene.quarantine.trusts(2)
    scene.now = SUSPECT_S
    assert not scene.quarantine.is_suspect(1) and scene.quarantine.trusts(1)


def test_a_second_suspicion_within_an_hour_ends_the_channels_of_a_user_for_an_hour() -> None:
    scene = Scene()
    for scene.now in (0.0, SUSPECT_S):
        scene.quarantine.add_suspect(1)
    scene.now = QUARANTINE_S
    assert not scene.quarantine.is_suspect(1) and not scene.quarantine.trusts(1)
    scene.now = SUSPECT_S + QUARANTINE_S
    assert scene.quarantine.trusts(1)


def test_a_user_with_a_quarantined_input_gets_no_channel() -> None:
    scene = Scene()
    scene.quarantine.add_text(1, b"x")
    assert not scene.quarantine.trusts(1)
    scene.now = QUARANTINE_S
    assert scene.quarantine.trusts(1)
