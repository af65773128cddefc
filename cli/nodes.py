"""Lists of a fleet on the command line: the column and the option of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ..backends.errors import NotFound
from .one_shot import OneShotClient
from .output import Columns

Node = Annotated[
    str | None,
    typer.Option(
        "--node", metavar="NODE", help="Only of this node of a fleet.", show_default=False
    ),
]
NODE_COLUMN: Columns = {"NODE": "node"}
"""The first column of lists; `columns_for` leaves it out on a single machine."""


def check_node(client: OneShotClient, node: str | None) -> None:
    """Check that the server is a fleet that has *node*, if one is given.

    :raises NotFound: the fleet does not have *node*, or the server is a single daemon.
    """
    if node is not None:
        stats_on(client.stats(), node)


def stats_on(stats: Mapping[str, Any], node: str | None) -> dict[str, Any]:
    """Return the statistics of *node*, or those of all nodes.

    :raises NotFound: the fleet does not have *node*, or the server is a single daemon.
    """
    if node is None:
        return dict(stats)
    names = sorted(stats.get("nodes", ()))
    if node not in names:
        raise NotFound(
            f"there is no node {node!r}",
            hint=f"the nodes are {', '.join(names)}" if names else "this is not a fleet",
            data={"nodes": names},
        )
    own = {
        "models": {n: one for n, one in stats["models"].items() if n.endswith(f"@{node}")},
        "metrics": {family: on_nodes(found, node) for family, found in stats["metrics"].items()},
    }
    return {**stats, **stats["nodes"][node], **own}


def name_on_node(name: str, node: str | None) -> str:
    """Return a name for a model, or a task, that is unique in a fleet."""
    return name if node is None else f"{name}@{node}"


def on_nodes(entries: Sequence[Mapping[str, Any]], node: str | None) -> list[dict[str, Any]]:
    """Return the entries of each node, or of *node* alone. On a single machine nothing changes."""
    expanded = [one for entry in entries for one in entry.get("nodes", (entry,))]
    return [one for one in expanded if node is None or one.get("node") == node]
