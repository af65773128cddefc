"""The echo model's adapters, `upper` and `lower`, which change the case of its output.

A file is an adapter if its text is one of these words; NULs, spaces and newlines around it do not
count.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ..adapter_keys import AdapterInfo, AdapterSpec, split_key
from ..errors import InvalidArgument, LoadFailed

_ADAPTERS: dict[str, Callable[[bytes], bytes]] = {"upper": bytes.upper, "lower": bytes.lower}
"""By name, the function that an adapter applies to a letter."""
_KNOWN = " or ".join(_ADAPTERS)


class EchoAdapters:
    """The built-in adapters, and the keys of those `chosen` for the next steps."""

    def __init__(self) -> None:
        self.chosen: tuple[str, ...] = ()

    def add(self, spec: AdapterSpec) -> AdapterInfo:
        """Return the adapter that a file's text names; NULs may follow the text."""
        try:
            with open(spec.path, "rb") as file:
                name = file.read(64).strip(b"\0\n ").decode("ascii", "replace")
                size = os.fstat(file.fileno()).st_size
        except OSError as exc:
            raise LoadFailed(f"cannot open {spec.path!r}: {exc.strerror}") from None
        if name not in _ADAPTERS:
            raise LoadFailed(
                f"{spec.path!r} names no adapter of the echo model", hint=f"write {_KNOWN} into it"
            )
        return AdapterInfo(id=name, size_bytes=size)

    def remove(self, adapter_id: str) -> None:
        """Assert that the adapter is not in use; it is built in and stays available."""
        assert adapter_id not in {split_key(key)[0] for key in self.chosen}, "it is in use"

    def choose(self, keys: tuple[str, ...]) -> None:
        """Use these adapters from the next step on."""
        missing = next((key for key in keys if split_key(key)[0] not in _ADAPTERS), None)
        if missing is not None:
            raise InvalidArgument(f"no adapter {missing!r}", hint=f"the echo model has {_KNOWN}")
        self.chosen = keys


def adapt(letter: bytes, keys: tuple[str, ...]) -> bytes:
    """Apply the adapters of *keys* to *letter*."""
    for key in keys:
        letter = _ADAPTERS[split_key(key)[0]](letter)
    return letter
