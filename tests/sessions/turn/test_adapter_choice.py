"""Choice of adapters by name, by place, by the configuration, without a worker."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.backends import AdapterInfo, AdapterSpec
from inferd.backends.errors import InvalidArgument, LoadFailed
from inferd.backends.model_spec import adapter_key, split_key
from inferd.scheduler.messages import AdapterReport
from inferd.scheduler.owner import Owner
from inferd.sessions import Opening, TurnOptions
from inferd.sessions.turn.options import chosen_keys, scales_by_name
from tests.sessions.doubles import Harness


def report(name: str, adapter_id: str, scale: float = 0.0) -> AdapterReport:
    spec = AdapterSpec(name=name, path=f"/m/{name}.gguf", scale=scale)
    if not adapter_id:
        return AdapterReport(spec=spec, error=LoadFailed(f"{name} is damaged").to_wire())
    return AdapterReport(spec=spec, info=AdapterInfo(id=adapter_id, size_bytes=1))


REPORTS = {
    "style": report("style", "b2"),
    "tone": report("tone", "a1"),
    "same": report("same", "b2"),
    "bad": report("bad", ""),
}


@pytest.mark.parametrize(
    ("lora", "keys"),
    [
        (None, ()),
        ([], ()),
        ([["style", 1.0]], ("b2*1.0",)),
        ([["style", 0.5], ["tone", -2.0]], ("a1*-2.0", "b2*0.5")),
        ([["tone", -2.0], ["style", 0.5]], ("a1*-2.0", "b2*0.5")),
        ([[1, 0.7]], ("a1*0.7",)),
        ([["style", 0.0], ["bad", 0.0]], ()),
        ([["style", 0.5], ["same", 0.25]], ("b2*0.75",)),
        ([["style", 0.5], ["same", -0.5]], ()),
    ],
)
def test_what_was_asked_for_becomes_sorted_keys(lora: Any, keys: tuple[str, ...]) -> None:
    assert chosen_keys(REPORTS, lora) == keys


def test_without_a_choice_the_configured_scales_hold() -> None:
    reports = REPORTS | {"on": report("on", "c3", scale=0.5)}

    assert chosen_keys(reports, None) == ("c3*0.5",)
    assert chosen_keys(reports, []) == ()


@pytest.mark.parametrize("which", ["stile", 4, -1])
def test_what_the_model_has_not_is_refused_with_what_it_has(which: str | int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chosen_keys(REPORTS, [[which, 0.0]])
    assert repr(which) in caught.value.message
    assert "style, tone, same, bad" in caught.value.hint
    assert ("did you mean 'style'?" in caught.value.hint) == (which == "stile")
    assert caught.value.data == {"adapters": list(REPORTS)}


def test_one_that_could_not_be_loaded_is_refused_with_its_own_error() -> None:
    with pytest.raises(LoadFailed, match="bad is damaged"):
        chosen_keys(REPORTS, [["bad", 1.0]])
    with pytest.raises(LoadFailed, match="broken is damaged"):
        chosen_keys(
            {
                "broken": AdapterReport(
                    spec=AdapterSpec(name="broken", path="", scale=1.0),
                    error=LoadFailed("broken is damaged").to_wire(),
                )
            },
            None,
        )


def test_the_metadata_have_names_or_ids_of_removed_adapters() -> None:
    assert scales_by_name(REPORTS, ("a1*0.5", "b2*1.0", "gone*2.0")) == {
        "tone": 0.5,
        "same": 1.0,
        "gone": 2.0,
    }


@pytest.mark.parametrize("scale", [1.0, 0.1, 1 / 3, -100.0, 1e-9])
def test_a_key_has_the_very_scale(scale: float) -> None:
    assert split_key(adapter_key("abc", scale)) == ("abc", scale)
    assert split_key("abc") == ("abc", 1.0)


@pytest.mark.asyncio
async def test_a_session_looks_for_its_state_by_the_adapters_of_its_last_turn() -> None:
    harness = Harness()
    session, _ = harness.manager.open_session(Opening("c", Owner(1), harness.source, {}, "id"))
    await session.set_input(b"a text")
    turn = await session.start_turn(TurnOptions(options={"lora": ["loud"]}))
    harness.port.run()
    assert turn.text == b"A TEXT"
    harness.manager.detach_session(session)
    assert harness.port.kept_with == [("upper*1.0",)]
