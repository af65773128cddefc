"""Write the variants of the models that test files read at their import.

Otherwise each process that collects the tests of a fresh clone would write them.
"""

from __future__ import annotations

from tests.models import fast_smollm2, first_blocks_of_smollm2, short_smollm2
from tests.small_gemma import small_gemma3

__all__ = ("main",)


def main() -> None:
    """Write those that are missing."""
    fast_smollm2()
    short_smollm2()
    first_blocks_of_smollm2(29)
    small_gemma3()


if __name__ == "__main__":
    main()
