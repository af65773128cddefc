"""Sessions that move between nodes with more images than one upload of a session takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from inferd import Client, Image
from inferd.backends.errors import InferdError
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.pictures import png
from tests.waiting import wait_until

CONFIG = echo_model("eyes", slots=2, media=True, **{"ctx-size": 100_000})


@cache
def pictures() -> list[bytes]:
    """Return two images; made at their first use."""
    return [png(32, 32, padding=11 << 20, text=b"%d" % number) for number in range(2)]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[RunningFleet]:
    """A fleet with the dormant session `diary`, which has all the pictures."""
    with running_fleet(tmp_path, CONFIG, "a", "b", more='copies = "off"\n') as running:
        with (
            Client(running.socket) as client,
            client.session("eyes", session_id="diary") as session,
        ):
            for picture in pictures():
                session.chat(["Look at this", Image(picture)], options={"n-predict": 1})
        yield running


def media_bytes(fleet: RunningFleet, node: str) -> int:
    """Return the bytes of the images on a node, which may be written and deleted."""
    total = 0
    for folder, _, names in os.walk(fleet.daemons[node].directory / "state" / "media"):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(Path(folder) / name).st_size
    return total


def home_of(client: Client) -> str:
    """Return the node that has the session."""
    [found] = client.sessions(dormant=True)
    return str(found["node"])


def knows_each_daemon(fleet: RunningFleet, client: Client) -> bool:
    """Return whether the entry knows the daemon that runs on each node. Until then, it may note
    the loss of the killed one, which fails the requests on that node.
    """
    known = {name: node.get("instance") for name, node in client.stats()["nodes"].items()}
    running = {}
    for name, daemon in fleet.daemons.items():
        with Client(daemon.socket) as direct:
            running[name] = direct.stats()["instance"]
    return known == running


def check_diary(fleet: RunningFleet, client: Client, node: str) -> None:
    """Check that a node has the session with all pictures, and the other node has none."""
    wait_until(lambda: home_of(client) == node)
    wait_until(lambda: not media_bytes(fleet, "ab".replace(node, "")))
    assert media_bytes(fleet, node) == sum(map(len, pictures()))
    with client.session("eyes", session_id="diary") as session:
        assert session.context.attached
        asked = [one for one in session.history().messages if one["role"] == "user"]
        hashes = [one["content"][1]["sha256"] for one in asked]
        assert [session.media(sha256).data for sha256 in hashes] == pictures()


def test_a_drained_node_has_no_image_of_the_sessions_that_have_left(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client:
        source = home_of(client)
        result = client.drain(node=source)
        assert (result.moved, result.staying) == (1, [])
        check_diary(fleet, client, "ab".replace(source, ""))


@pytest.mark.parametrize("lost", ["source", "target", "entry"])
def test_a_session_and_its_images_are_on_one_node_whichever_member_is_lost(
    fleet: RunningFleet, lost: str
) -> None:
    with Client(fleet.socket) as client:
        source = home_of(client)
    target = "ab".replace(source, "")
    with ThreadPoolExecutor() as pool, Client(fleet.socket) as other:
        drained = pool.submit(other.drain, node=source)
        wait_until(lambda: media_bytes(fleet, target) > 0)
        if lost == "entry":
            fleet.kill_entry()
        else:
            fleet.daemons[source if lost == "source" else target].kill()
        with suppress(InferdError):
            drained.result()
    if lost == "entry":
        fleet.start_entry('copies = "off"\n')
    else:
        fleet.daemons[source if lost == "source" else target].start_again()
    with Client(fleet.socket) as client:
        wait_until(lambda: knows_each_daemon(fleet, client))
        wait_until(lambda: len(client.sessions(dormant=True)) == 1)
        check_diary(fleet, client, home_of(client))
