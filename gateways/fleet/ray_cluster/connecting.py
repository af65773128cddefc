"""The connection of a child process to a Ray cluster, its queries, and its pipe to the parent."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import Any, BinaryIO

import ray
from ray import serve

from .published import DEPLOYMENT
from .refusals import HeadNotReached, HeadRefuses, check_head

CALL_S_MAX = 5.0
NAMESPACE = "inferd"


def connect(address: str) -> None:
    """Connect to the cluster at *address*, of which this machine is a member.

    :raises HeadNotReached: no head answers there.
    :raises HeadRefuses: the head refuses this program.
    :raises Exception: an error of Ray, such as that this machine is not a member.
    """
    check_head(address)
    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


async def replica_metadata(application: str) -> dict[str, Any]:
    """Return the metadata of an application's replica; an empty map if it does not answer."""
    try:
        handle = serve.get_deployment_handle(DEPLOYMENT, application)
        async with asyncio.timeout(CALL_S_MAX), handle.choose_replica() as selection:
            return dict(selection.replica_metadata)
    except Exception:  # Ray raises many, each of which means that the replica has ended
        return {}


def own_output() -> BinaryIO:
    """Return the standard output for reports alone; send other output to the standard error."""
    own = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(own, "wb", buffering=0)


def end_with_parent() -> None:
    """Exit when the standard input is closed, by the parent or by the parent's exit."""
    threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def short_reason(exc: BaseException) -> str:
    """Return the first line of an error of Ray."""
    if isinstance(exc, HeadRefuses | HeadNotReached):
        return str(exc)
    lines = str(exc).strip().splitlines() or [""]
    return f"{type(exc).__name__}: {lines[0]}"
