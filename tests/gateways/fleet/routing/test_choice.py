"""The choice of a node: every rule by an example, and the promises by random fleets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.errors import Busy, ModelNotFound
from inferd.gateways.fleet.routing.choice import (
    FleetLoad,
    RouteRequest,
    choose_node,
    free_slots,
    predicted_wait_s,
    saved_s,
    starts_at_once,
)
from inferd.gateways.fleet.routing.loads import NONE, ByClass, ModelLoad, NodeLoad

LOW, NORMAL, HIGH, URGENT = range(4)
M = "m"


def loaded(slots: int = 4, **fields: object) -> ModelLoad:
    return ModelLoad(loaded=True, slots=slots, **fields)  # type: ignore[arg-type]


def node(load: ModelLoad | None = None, **fields: object) -> NodeLoad:
    values: dict[str, object] = {"sessions_max": 100, **fields}
    models = {} if load is None else {M: load}
    return NodeLoad(instance=1, models=models, **values)  # type: ignore[arg-type]


def chosen(request: RouteRequest | None = None, /, **nodes: NodeLoad) -> str:
    return choose_node(request or RouteRequest(M), FleetLoad(nodes))


def test_a_session_goes_to_its_home_although_that_is_full_and_draining() -> None:
    full = node(loaded(running=(0, 4, 0, 0)), draining=True, sessions=100)
    assert chosen(RouteRequest(M, home="a"), a=full, b=node(loaded())) == "a"


def test_a_session_whose_home_is_lost_opens_nowhere_else() -> None:
    with pytest.raises(Busy) as caught:
        choose_node(RouteRequest(M, home="b"), FleetLoad({"a": node(loaded())}, {"b"}))
    assert caught.value.data["node"] == "b" and caught.value.retry_after_s > 0


def test_a_loaded_model_is_preferred_to_a_load() -> None:
    assert chosen(a=node(ModelLoad()), b=node(loaded(running=(0, 3, 0, 0)))) == "b"


def test_a_load_is_preferred_to_a_longer_wait() -> None:
    busy = loaded(running=(0, 4, 0, 0), waiting=(0, 9, 0, 0), waiting_tokens=(0, 9000, 0, 0))
    assert chosen(a=node(busy), b=node(ModelLoad(load_s=2.0))) == "b"
    assert chosen(a=node(busy), b=node(ModelLoad(load_s=1000.0))) == "a"


def test_the_node_with_more_free_slots_is_preferred() -> None:
    assert chosen(a=node(loaded(running=(0, 2, 0, 0))), b=node(loaded())) == "b"


def test_of_equal_nodes_the_one_with_fewer_sessions_is_preferred() -> None:
    assert chosen(a=node(loaded(), sessions=7), b=node(loaded(), sessions=2)) == "b"


def test_the_recent_node_is_preferred_while_most_of_its_slots_are_free() -> None:
    request = RouteRequest(M, recent="a")
    assert chosen(request, a=node(loaded(running=(0, 1, 0, 0))), b=node(loaded())) == "a"
    assert chosen(request, a=node(loaded(running=(0, 2, 0, 0))), b=node(loaded())) == "b"


def covering(**covered: int) -> RouteRequest:
    return RouteRequest(M, covered_bytes=covered)


def test_the_node_with_the_longest_beginning_of_the_prompt_is_preferred() -> None:
    nodes = {name: node(loaded()) for name in "abc"}
    assert chosen(covering(b=1000, c=900), **nodes) == "b"
    assert chosen(covering(c=900), **nodes) == "c"
    nodes["c"] = node(loaded(running=(0, 1, 0, 0)))
    assert chosen(covering(c=900), **nodes) == "c", "most of its slots are free"
    nodes["c"] = node(loaded(running=(0, 2, 0, 0)))
    assert chosen(covering(c=900), **nodes) == "a"
    nodes["c"] = node(loaded(), draining=True)
    assert chosen(covering(c=900), **nodes) == "a"
    nodes["c"] = node(ModelLoad())
    assert chosen(covering(c=900), **nodes) == "a", "the model is not in memory there"


def test_the_beginning_of_a_prompt_is_worth_more_than_the_recent_node() -> None:
    nodes = {name: node(loaded()) for name in "ab"}
    assert chosen(RouteRequest(M, recent="a", covered_bytes={"b": 600}), **nodes) == "b"


def test_a_longer_wait_is_accepted_for_a_longer_time_saved() -> None:
    """Of 4000 tokens, which take 0.01 s each, or 40 s."""
    short = loaded(running=(0, 4, 0, 0), running_tokens=(0, 8000, 0, 0), token_s=0.001)
    longer = loaded(
        running=(0, 4, 0, 0), running_tokens=(0, 88_000, 0, 0), token_s=0.001, prompt_token_s=0.01
    )
    assert chosen(a=node(short), b=node(longer)) == "a"
    assert chosen(covering(b=16_000), a=node(short), b=node(longer)) == "b"
    assert chosen(covering(b=4_000), a=node(short), b=node(longer)) == "a", "only 10 s"


def two_models(own: ByClass = NONE, other: ByClass = NONE) -> NodeLoad:
    models = {M: loaded(running=own), "other": loaded(running=other)}
    return NodeLoad(instance=1, sessions_max=100, models=models)


def test_turns_of_other_models_count_as_they_share_the_processors() -> None:
    busy, idle = two_models(other=(0, 3, 0, 0)), two_models(own=(0, 1, 0, 0))
    assert chosen(a=busy, b=idle) == "b"
    assert chosen(RouteRequest(M, recent="a"), a=busy, b=idle) == "b"
    assert chosen(a=busy, b=two_models(own=(0, 4, 0, 0))) == "a", "a free slot comes first"


def test_turns_of_other_models_that_began_since_the_report_count() -> None:
    nodes = {name: two_models() for name in "ab"}
    opened = {("a", "other"): (0, 1, 0, 0)}
    assert choose_node(RouteRequest(M), FleetLoad(nodes, opened=opened)) == "b"


def test_a_free_slot_is_preferred_to_parking_another_turn() -> None:
    low = node(loaded(running=(4, 0, 0, 0)))
    assert chosen(RouteRequest(M, URGENT), a=low, b=node(loaded(running=(0, 3, 0, 0)))) == "b"


def test_parking_a_lower_class_is_preferred_to_waiting() -> None:
    low, same = node(loaded(running=(1, 0, 0, 3))), node(loaded(running=(0, 0, 0, 4)))
    assert chosen(RouteRequest(M, URGENT), a=same, b=low) == "b"


def test_contexts_opened_since_the_report_count() -> None:
    nodes = {"a": node(loaded()), "b": node(loaded(running=(0, 1, 0, 0)))}
    opened = {("a", M): (0, 2, 0, 0)}
    assert choose_node(RouteRequest(M), FleetLoad(nodes, opened=opened)) == "b"


def test_turns_that_ended_since_the_report_leave_their_slots() -> None:
    nodes = {n: node(loaded(running=(0, 4, 0, 0))) for n in "ab"}
    opened = {("b", M): (0, -1, 0, 0)}
    assert choose_node(RouteRequest(M), FleetLoad(nodes, opened=opened)) == "b"


def test_a_full_node_is_the_last_resort() -> None:
    full = node(loaded(), sessions=100)
    assert chosen(a=full, b=node(ModelLoad(load_s=99.0))) == "b"
    assert chosen(a=full) == "a", "it may take the place of an idle context"


def test_nodes_that_drain_or_refused_it_are_not_chosen() -> None:
    idle = node(loaded(running=(0, 3, 0, 0)))
    assert chosen(a=node(loaded(), draining=True), b=idle) == "b"
    assert chosen(RouteRequest(M, excluded={"a"}), a=node(loaded()), b=idle) == "b"


def test_a_node_whose_load_failed_is_the_last_resort() -> None:
    broken = node(ModelLoad(failed=True))
    assert chosen(a=broken, b=node(ModelLoad(load_s=99.0))) == "b"
    assert chosen(a=broken) == "a"


def test_a_fleet_that_drains_is_busy_until_the_shortest_wait() -> None:
    busy = loaded(
        running=(0, 4, 0, 0), waiting=(0, 9, 0, 0), waiting_tokens=(0, 900, 0, 0), token_s=0.01
    )
    longer = loaded(
        running=(0, 4, 0, 0), waiting=(0, 9, 0, 0), waiting_tokens=(0, 2000, 0, 0), token_s=0.01
    )
    with pytest.raises(Busy) as caught:
        chosen(a=node(busy, draining=True), b=node(longer, draining=True))
    assert caught.value.retry_after_s == pytest.approx(9.0)
    assert caught.value.data["nodes"] == ["a", "b"]


def test_an_unknown_model_is_named_with_those_that_exist() -> None:
    with pytest.raises(ModelNotFound) as caught:
        chosen(RouteRequest("other"), a=node(loaded()))
    assert caught.value.data["models"] == [M]


def test_a_model_that_only_a_lost_node_may_have_is_retried_later() -> None:
    with pytest.raises(Busy) as caught:
        choose_node(RouteRequest("other"), FleetLoad({"a": node(loaded())}, {"b"}))
    assert caught.value.data["nodes"] == ["b"] and caught.value.retryable


def test_a_node_without_memory_for_the_model_is_the_last_resort() -> None:
    full = node(ModelLoad(need_bytes=100), free_bytes=40, evictable_bytes=59)
    roomy = node(ModelLoad(need_bytes=100, load_s=99.0), free_bytes=40, evictable_bytes=60)
    assert chosen(a=full, b=roomy) == "b"
    assert chosen(a=full) == "a", "its daemon may load it with fewer slots"
    busy = loaded(running=(0, 4, 0, 0), running_tokens=(0, 9000, 0, 0))
    assert chosen(a=full, b=node(busy)) == "b", "a wait is preferred to a load without memory"


def test_a_loaded_model_needs_no_further_memory() -> None:
    assert chosen(a=node(loaded(), free_bytes=0), b=node(ModelLoad(), free_bytes=1 << 40)) == "a"


def test_a_node_of_unknown_memory_is_tried() -> None:
    unknown = node(ModelLoad(load_s=1.0), free_bytes=10)
    roomy = node(ModelLoad(need_bytes=100, load_s=2.0), free_bytes=100)
    assert chosen(a=unknown, b=roomy) == "a"
    assert chosen(a=node(ModelLoad(need_bytes=100, load_s=1.0)), b=roomy) == "a"


def test_free_memory_is_preferred_to_that_of_idle_models() -> None:
    other = node(ModelLoad(need_bytes=100), free_bytes=99, evictable_bytes=1000)
    free = node(ModelLoad(need_bytes=100), free_bytes=100, sessions=9)
    assert chosen(a=other, b=free) == "b"


def test_requests_join_a_load_while_it_has_slots_for_them() -> None:
    cold = node(ModelLoad(slots=2, load_s=30.0))
    loading = node(ModelLoad(slots=2, load_s=20.0, loading=True), sessions=5)
    opened: dict[tuple[str, str], ByClass] = {("b", M): (0, 1, 0, 0)}
    assert choose_node(RouteRequest(M), FleetLoad({"a": cold, "b": cold}, (), opened)) == "b"
    assert chosen(a=cold, b=loading) == "b"
    opened = {("b", M): (0, 2, 0, 0)}
    assert choose_node(RouteRequest(M), FleetLoad({"a": cold, "b": cold}, (), opened)) == "a"


def test_turns_that_wait_for_a_load_count() -> None:
    waiting = ModelLoad(slots=1, loading=True, waiting=(0, 3, 0, 0), waiting_tokens=(0, 900, 0, 0))
    assert chosen(a=node(waiting), b=node(ModelLoad(slots=1))) == "b"


counts = st.tuples(*[st.integers(0, 6)] * 4)
tokens = st.tuples(*[st.integers(0, 5000)] * 4)
models = st.builds(
    ModelLoad,
    loaded=st.booleans(),
    loading=st.booleans(),
    failed=st.booleans(),
    slots=st.integers(1, 6),
    running=counts,
    waiting=counts,
    running_tokens=tokens,
    waiting_tokens=tokens,
    token_s=st.floats(1e-5, 1.0),
    prompt_token_s=st.none() | st.floats(1e-5, 1.0),
    load_s=st.floats(0.1, 100.0),
    need_bytes=st.none() | st.integers(0, 100),
)
nodes_of_fleets = st.builds(
    NodeLoad,
    instance=st.just(1),
    draining=st.booleans(),
    sessions=st.integers(0, 5),
    sessions_max=st.integers(1, 5),
    free_bytes=st.none() | st.integers(0, 100),
    evictable_bytes=st.integers(0, 100),
    models=st.one_of(st.just({}), models.map(lambda load: {M: load})),
)
names = st.sampled_from("abcde")
fleets = st.builds(
    FleetLoad,
    loads=st.dictionaries(names, nodes_of_fleets, max_size=5),
    unreachable=st.just(frozenset()),
    opened=st.dictionaries(names.map(lambda name: (name, M)), st.tuples(*[st.integers(-3, 6)] * 4)),
)
requests = st.builds(
    RouteRequest,
    model=st.just(M),
    priority=st.integers(0, 3),
    recent=st.none() | names,
    covered_bytes=st.dictionaries(names, st.integers(0, 100_000)),
)


def usable(fleet: FleetLoad) -> dict[str, tuple[ModelLoad, ByClass]]:
    """Return the nodes that may be chosen, with the load of their model."""
    found = {
        name: (load.models[M], fleet.opened.get((name, M), NONE))
        for name, load in fleet.loads.items()
        if M in load.models and not load.draining
    }
    sound = {name: pair for name, pair in found.items() if not pair[0].failed} or found
    free = {n: pair for n, pair in sound.items() if has_place(fleet.loads[n])} or sound
    return {n: pair for n, pair in free.items() if has_memory(fleet.loads[n], pair[0])} or free


def has_memory(node: NodeLoad, load: ModelLoad) -> bool:
    if load.loaded or load.need_bytes is None or node.free_bytes is None:
        return True
    return load.need_bytes <= node.free_bytes + node.evictable_bytes


def has_place(load: NodeLoad) -> bool:
    return load.sessions < load.sessions_max


@given(requests, fleets)
def test_a_request_never_waits_while_another_node_has_a_free_slot(
    request: RouteRequest, fleet: FleetLoad
) -> None:
    nodes = usable(fleet)
    if not nodes:
        return
    load, opened = nodes[choose_node(request, fleet)]
    if any(free_slots(*pair) for pair in nodes.values()):
        assert starts_at_once(load, opened, request.priority)
        assert free_slots(load, opened) > 0


@given(requests, fleets)
def test_a_request_never_waits_while_a_turn_of_a_lower_class_can_be_parked(
    request: RouteRequest, fleet: FleetLoad
) -> None:
    nodes = usable(fleet)
    if any(starts_at_once(*pair, request.priority) for pair in nodes.values()):
        assert starts_at_once(*nodes[choose_node(request, fleet)], request.priority)


@given(requests, fleets)
def test_the_predicted_wait_less_the_time_saved_is_the_lowest_of_all_nodes(
    request: RouteRequest, fleet: FleetLoad
) -> None:
    nodes = usable(fleet)
    if not nodes or any(starts_at_once(*pair, request.priority) for pair in nodes.values()):
        return  # other tests say which node it is then
    delays = {}
    for name, (load, opened) in nodes.items():
        saved = saved_s(load, request.covered_bytes.get(name, 0))
        delays[name] = max(0.0, predicted_wait_s(load, opened, request.priority) - saved)
    assert delays[choose_node(request, fleet)] == min(delays.values())


@given(requests, fleets)
def test_a_choice_is_a_usable_node_or_an_error(request: RouteRequest, fleet: FleetLoad) -> None:
    try:
        assert choose_node(request, fleet) in usable(fleet)
    except ModelNotFound:
        assert not any(M in load.models for load in fleet.loads.values())
    except Busy as exc:
        assert not usable(fleet) and 0 < exc.retry_after_s <= 60


@given(requests, fleets, st.sampled_from("abcde"))
def test_more_work_on_a_node_never_attracts_a_request(
    request: RouteRequest, fleet: FleetLoad, name: str
) -> None:
    nodes = usable(fleet)
    if name not in nodes or choose_node(request, fleet) == name:
        return
    opened = dict(fleet.opened)
    if not (nodes[name][0].loaded or nodes[name][0].loading):
        return  # it may have to load the model now, for which a request may join
    own: ByClass = opened.get((name, M), NONE)
    opened[name, M] = (own[0], own[1], own[2], own[3] + 1)
    assert choose_node(request, FleetLoad(fleet.loads, (), opened)) != name


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 30))
def test_requests_within_one_report_spread_evenly(slots: int, size: int, count: int) -> None:
    nodes = {name: node(loaded(slots)) for name in "abcd"[:size]}
    given_to = dict.fromkeys(nodes, 0)
    for _ in range(count):
        opened: dict[tuple[str, str], ByClass] = {(n, M): (0, k, 0, 0) for n, k in given_to.items()}
        given_to[choose_node(RouteRequest(M), FleetLoad(nodes, (), opened))] += 1
    assert max(given_to.values()) - min(given_to.values()) <= 1


@pytest.mark.parametrize("text", ["smollm", "SMOLLM-2", "Smol2"])
def test_an_unknown_model_has_the_nearest_name_of_all_nodes(text: str) -> None:
    loads = {"a": NodeLoad(instance=1, models={"SmolLM2": loaded()}), "b": node(loaded())}
    with pytest.raises(ModelNotFound) as caught:
        choose_node(RouteRequest(text), FleetLoad(loads))
    assert "did you mean 'SmolLM2'?" in caught.value.hint
    assert caught.value.data["models"] == ["SmolLM2", "m"]
