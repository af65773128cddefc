"""The compiled guest of the other tests."""

from __future__ import annotations

from tests.gateways.wasm.guests import SUMS, sums


def test_the_guest_was_compiled_from_its_source() -> None:
    assert SUMS.read_text() == sums(), "compile it anew: `make guest`"
