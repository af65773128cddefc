"""The table of published nodes: what a report changes, and what a lost head does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.gateways.fleet.ray_cluster.published import (
    NODES_MAX,
    KnownNode,
    PublishedFile,
    PublishedNodes,
    addresses_of,
    merge_published,
)

A, B = "10.0.0.2:7878", "10.0.0.3:7878"
KNOWN = {"a": KnownNode(A, "first"), "b": KnownNode(B, "first")}


def test_a_node_without_a_replica_keeps_its_address() -> None:
    found = PublishedNodes("first", {"a": None, "b": "10.0.0.9:7878", "c": None})
    merged = merge_published(KNOWN, found)
    addresses = {name: node.address for name, node in merged.items()}
    assert addresses == {"a": A, "b": "10.0.0.9:7878", "c": None}


def test_a_node_is_removed_only_by_the_cluster_that_had_it() -> None:
    without_a: dict[str, str | None] = {"b": B}
    assert list(merge_published(KNOWN, PublishedNodes("first", without_a))) == ["b"]
    headless = merge_published(KNOWN, PublishedNodes("", without_a))
    assert headless == KNOWN, "the cluster is not known while its head is lost"
    second = PublishedNodes("second", without_a)
    restarted = merge_published(KNOWN, second)
    assert restarted == {"a": KNOWN["a"], "b": KnownNode(B, "second")}
    assert merge_published(restarted, second) == restarted, "a has not joined the new head yet"
    assert list(merge_published(restarted, PublishedNodes("second", {}))) == ["a"]


def test_addresses_are_checked() -> None:
    assert addresses_of({"a": KnownNode(None, "")}) == {"a": None}
    assert str(addresses_of(KNOWN)["a"]) == A
    with pytest.raises(InvalidArgument, match="is not an address"):
        addresses_of({"a": KnownNode("10.0.0.2", "")})
    with pytest.raises(InvalidArgument, match="not the name of a node"):
        addresses_of({"a.b": KnownNode(A, "")})
    with pytest.raises(InvalidArgument, match="more than"):
        addresses_of({str(i): KnownNode(None, "") for i in range(NODES_MAX + 1)})


def test_the_table_outlives_the_entry(tmp_path: Path) -> None:
    file = PublishedFile(tmp_path)
    assert file.read() == {}
    file.write(KNOWN)
    assert PublishedFile(tmp_path).read() == KNOWN
    (tmp_path / "published.json").write_text("{")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        file.read()
