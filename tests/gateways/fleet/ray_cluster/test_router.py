"""Calls to replicas of Ray Serve by handles: each goes to the node that `choose_node` names."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import Busy, InvalidArgument, ModelNotFound
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.fleet.ray_cluster.routed_nodes import NAMED
from tests.gateways.fleet.ray_members import OBJECT_STORE_BYTES, RAY_S_MAX
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # Ray itself has many
]
SLOTS = 4
COMMON = "[daemon]\nsessions-max = 1000\n" + echo_model("m", step_ms=20, slots=SLOTS)
CONFIGS = {name: COMMON + echo_model(f"only-{name}", slots=SLOTS) for name in "abc"}
TEXT = "a text that takes the model about a second"
NUMBERS = itertools.count()
ROUTER = "tests.gateways.fleet.ray_cluster.noting_router.NotingRouter"


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningDaemon]]:
    """The daemons of three nodes, with all their models loaded."""
    with ExitStack() as stack:
        found = {n: stack.enter_context(running_daemon(c)) for n, c in CONFIGS.items()}
        for daemon in found.values():
            with Client(daemon.socket) as client:
                for model in client.models():
                    client.unload(client.load_by_name(model["name"]), keep=True)
        yield found


@pytest.fixture(scope="module")
def handle(
    daemons: dict[str, RunningDaemon], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A handle of a deployment that calls one with a replica beside each daemon."""
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from tests.gateways.fleet.ray_cluster.routed_nodes import Front, RoutedNode

    folder = tmp_path_factory.mktemp("nodes")
    for name, daemon in daemons.items():
        (folder / f"{name}.socket").write_text(daemon.socket)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token for all of Ray
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
        )
        serve.start(proxy_location="Disabled")
        nodes = serve.deployment(
            RoutedNode,
            num_replicas=len(daemons),
            max_ongoing_requests=1000,
            health_check_period_s=1.0,
            ray_actor_options={"num_cpus": 0},
            request_router_config=RequestRouterConfig(
                request_router_class=ROUTER, request_routing_stats_period_s=0.2
            ),
        )
        front = serve.deployment(Front, ray_actor_options={"num_cpus": 0})
        yield serve.run(front.bind(nodes.bind(str(folder))), name="routed", route_prefix=None)
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
def nodes(handle: Any) -> Any:
    """A handle of the nodes."""
    from ray import serve

    return serve.get_deployment_handle("RoutedNode", "routed")


class Calls:
    """Calls by a handle, many at once."""

    def __init__(self, nodes: Any):
        self._nodes = nodes
        self._begun: list[tuple[int, Any]] = []

    def begin(self, count: int, model: str = "m", session: str = "", text: str = TEXT) -> None:
        """Begin calls."""
        named = self._nodes.options(multiplexed_model_id=model, session_id=session)
        for _ in range(count):
            number = next(NUMBERS)
            self._begun.append((number, named.remote(number, model, text)))

    def results(self) -> list[str]:
        """Return the nodes that have answered, each of which is the one that was named."""
        found = []
        for number, response in self._begun:
            found.append(response.result(timeout_s=RAY_S_MAX))
            assert found[-1] == NAMED[number]
        return found


def answering(nodes: Any, count: int, **options: str) -> list[str]:
    """Return the nodes that have answered calls of one moment."""
    calls = Calls(nodes)
    calls.begin(count, **options)
    return calls.results()


def process_on(nodes: Any, model: str, session: str = "") -> int:
    """Return the id of the process of a replica, once its node has reported its load."""
    named = nodes.options(multiplexed_model_id=model, session_id=session, method_name="process")
    return int(named.remote(next(NUMBERS)).result(timeout_s=RAY_S_MAX))


def test_calls_of_one_moment_fill_the_slots_of_all_nodes(nodes: Any) -> None:
    assert len({process_on(nodes, f"only-{name}") for name in "abc"}) == 3
    assert Counter(answering(nodes, 3 * SLOTS)) == dict.fromkeys("abc", SLOTS)


def test_calls_of_one_request_go_to_their_own_nodes(handle: Any) -> None:
    found = handle.remote([TEXT] * 3 * SLOTS).result(timeout_s=RAY_S_MAX)
    assert set(found) == set("abc")


def test_calls_go_to_the_nodes_that_have_the_model_and_free_slots(
    nodes: Any, daemons: dict[str, RunningDaemon]
) -> None:
    with Client(daemons["a"].socket) as client, ThreadPoolExecutor(SLOTS) as pool:
        for _ in range(SLOTS):
            session = client.session("m").__enter__()
            pool.submit(session.chat, TEXT * 20)
        wait_until(lambda: [task["state"] for task in client.queue()] == ["running"] * SLOTS)
        wait_until(lambda: set(answering(nodes, 2 * SLOTS, text="x")) == {"b", "c"})
        assert answering(nodes, 2 * SLOTS, model="only-a", text="x") == ["a"] * 2 * SLOTS
        client.close()
    wait_until(lambda: "a" in answering(nodes, 3 * SLOTS, text="x"))


def test_sessions_stay_at_home_among_many_calls(nodes: Any) -> None:
    calls = Calls(nodes)
    for _ in range(20):
        for session in range(20):
            calls.begin(1, session=f"session-{session}", text="x")
    found = calls.results()
    homes = found[:20]
    assert found == homes * 20 and set(homes) == set("abc")


def test_errors_are_typed_and_soon(nodes: Any) -> None:
    with pytest.raises(ModelNotFound, match="no node has a model named 'none'"):
        answering(nodes, 1, model="none")
    with pytest.raises(InvalidArgument, match="names no model"):
        answering(nodes, 1, model="")


def test_a_lost_replica_is_the_home_of_its_sessions_until_it_is_back(
    nodes: Any, daemons: dict[str, RunningDaemon]
) -> None:
    homes = {
        answering(nodes, 1, session=f"kept-{number}", text="x" * number)[0]: f"kept-{number}"
        for number in range(12)
    }
    before = process_on(nodes, "m", homes["b"])
    os.kill(before, signal.SIGKILL)
    assert set(answering(nodes, 3 * SLOTS, text="x")) <= set("ac")
    with pytest.raises(Busy, match="node b cannot be reached") as caught:
        answering(nodes, 1, session=homes["b"], text="x")
    assert caught.value.retry_after_s > 0
    assert answering(nodes, 1, session=homes["a"], text="x") == ["a"]
    wait_until(lambda: _is_back(nodes, homes["b"]), RAY_S_MAX)
    assert process_on(nodes, "m", homes["b"]) != before


def _is_back(nodes: Any, session: str) -> bool:
    try:
        return answering(nodes, 1, session=session, text="x") == ["b"]
    except Busy:
        return False
