"""What a turn that makes an embedding tells: WasmEdge's output 0."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from ...scheduler.messages import Embedded


def embedding_json(told: Embedded) -> bytes:
    """Return `{"n_embedding": …, "embedding": […]}`; without pooling a list of each token's."""
    numbers = array("f")
    numbers.frombytes(told.vectors)
    # Nine digits are all that a float32 has; as a double it would show up to 17.
    vector: list[Any] = [float(f"{x:.9g}") for x in numbers]
    if told.pooling == "none":
        vector = [vector[i : i + told.size] for i in range(0, len(vector), told.size)]
    return msgspec.json.encode({"n_embedding": told.size, "embedding": vector})
