"""Context managers that close themselves at the end of their `with` block."""

from __future__ import annotations

from typing import Self


class Closing:
    """An object that is closed at the end of `with`."""

    def close(self) -> None:
        """Close the object."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClosing:
    """An object that is closed at the end of `async with`."""

    async def aclose(self) -> None:
        """Close the object."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
