"""Pooling of token vectors into one, by llama-server's names and numbers."""

from __future__ import annotations

from array import array

import pytest

from inferd.backends.embedder import EmbedInfo, Pool, check_pooling, normalized
from inferd.backends.errors import UnsupportedOperation

VECTORS = [[1.0, 2.0, -4.0], [3.0, 0.0, 0.0], [2.0, 4.0, 1.0]]


def numbers(data: bytes) -> list[float]:
    found = array("f")
    found.frombytes(data)
    return found.tolist()


def pooled(pooling: str, *chunks: list[list[float]]) -> list[float]:
    pool = Pool(pooling)
    for chunk in chunks:
        pool.add_vectors(chunk)
    return numbers(pool.result(-1))


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("mean", [2.0, 2.0, -1.0]),
        ("cls", VECTORS[0]),
        ("last", VECTORS[2]),
        ("none", [x for vector in VECTORS for x in vector]),
    ],
)
def test_the_pooled_vector_does_not_depend_on_the_chunks(
    pooling: str, expected: list[float]
) -> None:
    assert pooled(pooling, VECTORS) == expected
    assert pooled(pooling, VECTORS[:1], VECTORS[1:]) == expected
    assert pooled(pooling, VECTORS[:2], VECTORS[2:]) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (-1, [3.0, -4.0]),
        (0, [24570.0, -32760.0]),
        (1, [3 / 7, -4 / 7]),
        (2, [0.6, -0.8]),
        (3, [3 / 91 ** (1 / 3), -4 / 91 ** (1 / 3)]),
    ],
)
def test_the_norms_are_those_of_llama_server(kind: int, expected: list[float]) -> None:
    assert normalized([3.0, -4.0], kind).tolist() == pytest.approx(expected, rel=1e-6)


def test_small_numbers_do_not_vanish_in_a_high_norm() -> None:
    assert normalized([3e-12, -4e-12], 32)[1] == pytest.approx(-1.0, rel=1e-3)


@pytest.mark.parametrize("kind", [-1, 0, 1, 2, 5])
def test_a_vector_of_zeros_is_not_normalised(kind: int) -> None:
    assert normalized([0.0, 0.0], kind).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("pooling", ["none", "rank"])
def test_unpooled_vectors_and_ranks_are_not_normalised(pooling: str) -> None:
    pool = Pool(pooling)
    pool.add_vectors([[3.0, 4.0]])
    assert numbers(pool.result(2)) == [3.0, 4.0]


def test_ranks_are_for_models_that_rank() -> None:
    ranks, others = (
        EmbedInfo(size=4, slots=1, batch_tokens_max=8, tokens_max=8, pooling=own)
        for own in ("rank", "cls")
    )
    assert (check_pooling(ranks, ""), check_pooling(others, "")) == ("rank", "cls")
    assert check_pooling(others, "last") == "last"
    for info, wanted in ((ranks, "mean"), (others, "rank")):
        with pytest.raises(UnsupportedOperation, match=wanted):
            check_pooling(info, wanted)
