"""The beginnings of prompts that each node has computed lately, remembered within bounds.

A prompt is cut into blocks, and a block's digest covers the text up to its end. Two prompts that
begin alike have the same first digests. Texts themselves are not kept.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

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
        """Note that *node* computes a prompt."""
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
