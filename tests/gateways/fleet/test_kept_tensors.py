"""Outputs of graphs that stay on the node of their context."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from inferd import Client, NotFound
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.onnx_graphs import affine, write_graphs


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("graphs")
    write_graphs(folder, {"affine": affine()})
    config = f"[models.affine]\nfile = {json.dumps(str(folder / 'affine.onnx'))}\n"
    with running_fleet(tmp_path_factory.mktemp("fleet"), config, "a", "b") as running:
        yield running


def test_a_kept_tensor_is_the_next_input_of_its_context(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client, client.graph("affine") as graph:
        state = graph.run({"a": [[1, 2]], "b": [[0, 0]]}, keep=["y"])["y"]
        for _ in range(3):
            state = graph.run({"a": state, "b": [[0, 0]]}, keep=["y"])["y"]
        assert graph.run({"a": state, "b": [[1, 1]]})["y"].tolist() == [[33, 65]]
    with (
        Client(fleet.socket) as client,
        client.graph("affine") as graph,
        pytest.raises(NotFound),
    ):
        graph.run({"a": state, "b": [[1, 1]]})
