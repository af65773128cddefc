"""The node that loads a model before a request needs it there."""

from __future__ import annotations

from inferd.gateways.fleet.routing.choice import FleetLoad, node_to_warm_up
from inferd.gateways.fleet.routing.loads import ByClass, ModelLoad, NodeLoad

M = "m"
HALF_BUSY = ModelLoad(loaded=True, slots=4, running=(0, 2, 0, 0))
COLD = ModelLoad(slots=4, need_bytes=100)


def node(load: ModelLoad, *, other: ModelLoad | None = None, **fields: object) -> NodeLoad:
    models = {M: load} if other is None else {M: load, "other": other}
    values: dict[str, object] = {"free_bytes": 100, "sessions_max": 100, **fields}
    return NodeLoad(instance=1, models=models, **values)  # type: ignore[arg-type]


def warmed_up(**nodes: NodeLoad) -> str | None:
    return node_to_warm_up(M, "a", FleetLoad(nodes))


def test_an_idle_node_loads_the_model_once_half_of_the_slots_are_taken() -> None:
    assert warmed_up(a=node(HALF_BUSY), b=node(COLD)) == "b"
    idle = ModelLoad(loaded=True, slots=4, running=(0, 1, 0, 0))
    assert warmed_up(a=node(idle), b=node(COLD)) is None
    assert warmed_up(a=node(HALF_BUSY)) is None


def test_turns_of_other_models_count_as_taken_slots() -> None:
    idle = ModelLoad(loaded=True, slots=4)
    busy = ModelLoad(loaded=True, slots=4, running=(0, 2, 0, 0))
    assert warmed_up(a=node(idle, other=busy), b=node(COLD)) == "b"
    assert warmed_up(a=node(HALF_BUSY), b=node(COLD, other=busy)) is None, "it is not idle"


def test_one_node_loads_it_at_a_time() -> None:
    loading = ModelLoad(slots=4, loading=True, need_bytes=100)
    assert warmed_up(a=node(HALF_BUSY), b=node(COLD), c=node(loading)) is None
    begun: dict[tuple[str, str], ByClass] = {("c", M): (1, 0, 0, 0)}
    fleet = FleetLoad({"a": node(HALF_BUSY), "b": node(COLD), "c": node(COLD)}, (), begun)
    assert node_to_warm_up(M, "a", fleet) is None


def test_no_other_model_is_unloaded_for_it() -> None:
    short = node(COLD, free_bytes=99, evictable_bytes=1000)
    assert warmed_up(a=node(HALF_BUSY), b=short) is None
    assert warmed_up(a=node(HALF_BUSY), b=short, c=node(COLD)) == "c"


def test_nodes_that_cannot_load_it_are_left_out() -> None:
    failed = node(ModelLoad(slots=4, failed=True))
    assert warmed_up(a=node(HALF_BUSY), b=failed, c=node(COLD, draining=True)) is None


def test_the_fastest_load_is_preferred() -> None:
    slow, fast = (ModelLoad(slots=4, load_s=load_s) for load_s in (9.0, 2.0))
    assert warmed_up(a=node(HALF_BUSY), b=node(slow), c=node(fast)) == "c"
