"""Stored responses: read, listed with their input, and deleted.

A response is a session of its caller in the daemon. The session's note is the response as it was
sent, so that it survives a restart, and is deleted with the session.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .....backends.errors import UnsupportedOperation
from .....ipc.client import HistoryResult
from ...exchange import Exchange
from ...exchange.statuses import HttpRefusal
from .fields import INPUT_ITEMS, RESPONSE_ID, RETRIEVE, InputItemsQuery
from .items import input_items, mark_in, mark_of


def note_of(response: dict[str, Any]) -> bytes:
    """Return a response as it is stored: without logprobs, which are many times longer than it."""
    return msgspec.json.encode({**response, "output": [_bare(item) for item in response["output"]]})


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


async def answer_stored(exchange: Exchange) -> None:
    """Answer with a stored response."""
    RETRIEVE.read_query(exchange.query)
    found = await _find(exchange)
    if not found.note:
        response_id = exchange.params["response"]
        raise HttpRefusal(
            404,
            f"the response {response_id!r} is not stored whole: it has not ended, was interrupted,"
            " or is too long",
            hint="previous_response_id continues it once it has ended",
            param="response_id",
        )
    await exchange.send_whole(found.note)


async def answer_input_items(exchange: Exchange) -> None:
    """Answer with the items of a stored response's input, those of earlier responses included."""
    query = INPUT_ITEMS.read_query(exchange.query)
    found = await _find(exchange)
    await exchange.send_json(_page(_items_of(exchange.params["response"], found), query))


def _items_of(response_id: str, found: HistoryResult) -> list[dict[str, Any]]:
    """Return the items before the response's own output, without its instructions."""
    first = int(mark_in(response_id) != mark_of(None))
    return input_items(response_id, found.messages[first:-1])


def _page(items: list[dict[str, Any]], query: InputItemsQuery) -> dict[str, Any]:
    """Return the part of a list that a query selects.

    :raises HttpRefusal: no item has the id *after*.
    """
    ordered = items if query.order == "asc" else items[::-1]
    first = 0
    if query.after is not None:
        ids = [item["id"] for item in ordered]
        if query.after not in ids:
            raise HttpRefusal(404, f"there is no item {query.after[:100]!r}", param="after")
        first = ids.index(query.after) + 1
    data = ordered[first : first + query.limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > first + query.limit,
    }


async def delete_response(exchange: Exchange) -> None:
    """Delete a stored response; responses that continue it stay."""
    response_id = _id_of(exchange)
    if not await exchange.turns.delete_session(exchange.caller, response_id):
        raise no_response(response_id)
    await exchange.send_json({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(exchange: Exchange) -> None:
    """Refuse to cancel a stored response, because none runs in the background.

    :raises UnsupportedOperation: always, if the response exists.
    """
    await _find(exchange)
    raise UnsupportedOperation(
        "only a response in the background can be cancelled",
        hint="disconnect to end a response that is being streamed",
        data={"param": "response_id"},
    )


async def compact(exchange: Exchange) -> None:
    """Refuse to compact a history.

    :raises UnsupportedOperation: always.
    """
    raise UnsupportedOperation(
        f"{exchange.path}: histories are not compacted",
        hint="send a shorter history, or continue a response with previous_response_id",
    )


async def _find(exchange: Exchange) -> HistoryResult:
    response_id = _id_of(exchange)
    found = await exchange.turns.history(exchange.caller, response_id)
    if found is None:
        raise no_response(response_id)
    return found


def _id_of(exchange: Exchange) -> str:
    """Return the id in a path; ids of another form name no response."""
    response_id = exchange.params["response"]
    if re.fullmatch(RESPONSE_ID, response_id) is None:
        raise no_response(response_id)
    return response_id


def no_response(response_id: str) -> HttpRefusal:
    """Return the error for an id with which the caller has no response."""
    return HttpRefusal(
        404,
        f"there is no response {response_id[:100]!r}",
        hint="it was deleted, was created with `store: false`, or belongs to another caller",
        param="response_id",
    )
