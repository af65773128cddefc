"""The nodes that have clients' sessions, recent contexts and the beginnings of prompts, remembered
within bounds.

A prompt is cut into blocks, and a block's digest covers the text up to its end. Two prompts that
begin alike have the same first digests. Texts themselves are not kept, and are only compared with
those of other requests: two of them begin alike if the inputs of the model do.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ....backends.errors import InferdError
from ....backends.recent_dict import RecentDict
from ....ipc.messages import METADATA_INDEX, Call, SetInputParams, Tensor
from ..frames import UNREADABLE, Fields, integer_in, is_given, text_in

HOMES_MAX = 100_000
RECENT_MAX = 10_000


class FleetUser(NamedTuple):
    """The owner of sessions: a user as nodes know it, and a label."""

    user: str
    label: str


class SessionKey(NamedTuple):
    """A session with an id."""

    owner: FleetUser
    session_id: str


class RecentKey(NamedTuple):
    """An owner's use of a model."""

    owner: FleetUser
    model: str


K = TypeVar("K")


class NodeTable(Generic[K]):
    """Nodes by key, of which the least recently used are forgotten. Owned by the entry's loop."""

    def __init__(self, size_max: int):
        self._nodes = RecentDict[K, str](size_max)

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, key: K) -> str | None:
        node = self._nodes.get(key)
        if node is not None:
            self._nodes.move_to_end(key)
        return node

    def put(self, key: K, node: str) -> None:
        self._nodes[key] = node

    def drop(self, key: K) -> None:
        self._nodes.pop(key, None)

    def count_on(self, node: str) -> int:
        return sum(found == node for found in self._nodes.values())


_items = msgspec.msgpack.Decoder(list[msgspec.Raw])
_options = msgspec.msgpack.Decoder(Fields)
_tensor = msgspec.msgpack.Decoder(Tensor)
_inputs = msgspec.msgpack.Decoder(list[tuple[str, Tensor]])


def is_setup(row: Call, params: Fields) -> bool:
    """Return whether a call prepares a new context, before the one that has its prompt."""
    if row.params is SetInputParams:
        return integer_in(params, "index") == METADATA_INDEX
    return row.sets_up


def setup_text(params: Fields) -> bytes:
    """Return the text that a setup call adds before the prompt: a system prompt, or tools."""
    try:
        return text_in(params, "system").encode() + _tools_in(params)
    except (InferdError, *UNREADABLE):
        return b""  # the node refuses the call


def prompt_text(row: Call, params: Fields) -> bytes:
    """Return the text of the prompt in a request; empty if it has none."""
    fields = {name: raw for name, raw in params.items() if name in row.params.__struct_fields__}
    try:
        return _text_of(fields)
    except (InferdError, *UNREADABLE):
        return b""  # the node refuses the call


def _text_of(params: Fields) -> bytes:
    """Return the text of a tensor, or of messages, tokens or a prompt that follow tools."""
    if "tensor" in params:
        return _tensor.decode(params["tensor"]).data
    if is_given(params, "inputs"):
        return b"".join(tensor.data for _, tensor in _inputs.decode(params["inputs"]))
    head = _tools_in(params)
    for name in ("messages", "prompt_tokens"):
        if is_given(params, name):
            # Not the encoded list, which begins with its length.
            return head + b"".join(bytes(raw) for raw in _items.decode(params[name]))
    return head + text_in(params, "prompt").encode()


def _tools_in(params: Fields) -> bytes:
    if not is_given(params, "options"):
        return b""
    return bytes(_options.decode(params["options"]).get("tools", b""))


BLOCK_BYTES_MIN = 128
BLOCK_SHARE = 16
"""Divisor: a block has at least 1/16 of the text before it, so a long prompt has few blocks."""
PROMPT_BYTES_MAX = 1 << 20
"""Bytes of a prompt's beginning that are compared."""
DIGEST_BYTES = 8
BLOCKS_MAX = 100_000
BLOCK_NODES_MAX = 16
"""Nodes that are remembered for one block: those that computed it last."""


class Block(NamedTuple):
    """A block of a prompt: the end of its text, and the digest of all text up to there."""

    end: int
    digest: bytes


def prompt_blocks(scope: str, text: bytes) -> list[Block]:
    """Return the blocks of a prompt; only prompts of the same *scope* have common ones."""
    hashed = hashlib.blake2b(scope.encode() + b"\0", digest_size=DIGEST_BYTES)
    blocks: list[Block] = []
    end, size = 0, BLOCK_BYTES_MIN
    while end + size <= min(len(text), PROMPT_BYTES_MAX):
        hashed.update(text[end : end + size])
        end += size
        blocks.append(Block(end, hashed.digest()))
        size = max(BLOCK_BYTES_MIN, end // BLOCK_SHARE)
    return blocks


class PromptTable:
    """The nodes that have computed blocks; the least recently computed blocks are forgotten. Owned
    by the entry's event loop.
    """

    def __init__(self, blocks_max: int = BLOCKS_MAX):
        self._blocks_max = blocks_max
        self._nodes: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def note_prompt(self, blocks: Sequence[Block], node: str) -> None:
        for _, digest in reversed(blocks):  # of one prompt, the last block is forgotten first
            others = (name for name in self._nodes.pop(digest, ()) if name != node)
            self._nodes[digest] = (node, *others)[:BLOCK_NODES_MAX]
        while len(self._nodes) > self._blocks_max:
            self._nodes.popitem(last=False)

    def covered_bytes(self, blocks: Sequence[Block]) -> dict[str, int]:
        """Return for each node how many bytes of a prompt's beginning it has computed."""
        covered: dict[str, int] = {}
        for end, digest in blocks:
            nodes = self._nodes.get(digest)
            if nodes is None:
                break
            covered.update(dict.fromkeys(nodes, end))
        return covered

    def forget_node(self, node: str) -> None:
        """Forget what a node has computed: it was lost."""
        for digest, nodes in tuple(self._nodes.items()):
            if node in nodes:
                left = tuple(name for name in nodes if name != node)
                if left:
                    self._nodes[digest] = left
                else:
                    del self._nodes[digest]
