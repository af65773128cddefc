"""The path and the content of the file of vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inferd.ipc.messages import PROTOCOL_VERSION

from .exchange import SOFTWARE
from .exchanges import EXCHANGES
from .malformed import ignored, malformed, malformed_daemon, refused

__all__ = ("PATH", "text")

PATH = Path(__file__).resolve().parents[2] / "docs" / "protocol-vectors.json"
ABOUT = [
    "Frames of inferd's protocol in hex, length included. `means` is the decoded array, in which",
    '{"$bin": HEX} stands for msgpack bin. docs/protocol.md explains the fields.',
    "exchanges: what is said with the model echo after a daemon's first start (instance 1), each",
    "exchange with a daemon of its own. `varies` has JSON pointers to values that differ from run",
    "to run and to texts that may be reworded. `descriptors` has what the memfds passed beside a",
    "frame contain.",
    "malformed: `frames` are sent by a client, after its hello if `hello` is true. The outcome is",
    "the name of an error reply or of a goodbye, or a reply.",
    "malformed_daemon: `frames` are sent by a daemon in answer to request 1 (`queue`), or, where",
    "`hello` is false, in place of its hello. The outcome is the error that a client raises, or a",
    "reply.",
]


def vectors() -> dict[str, Any]:
    """Return the whole file's content."""
    return {
        "about": ABOUT,
        "protocol": list(PROTOCOL_VERSION),
        "software": SOFTWARE,
        "exchanges": [exchange() for exchange in EXCHANGES],
        "malformed": malformed() + refused() + ignored(),
        "malformed_daemon": malformed_daemon(),
    }


def text() -> str:
    """Return the file's text."""
    return json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n"
