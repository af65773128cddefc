"""The detection of params that refer to descriptors."""

from __future__ import annotations

import msgspec

from ....backends.errors import InvalidArgument, UnsupportedOperation


class _Part(msgspec.Struct):
    fd: int = -1


class _TensorParams(_Part):
    tensor: _Part | None = None
    inputs: list[tuple[str, _Part]] | None = None


_params = msgspec.msgpack.Decoder(_TensorParams)


def count_descriptors(params: msgspec.Raw) -> int:
    """Return how many parts of params are in descriptors.

    :raises InvalidArgument: the params have other types.
    """
    try:
        found = _params.decode(params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidArgument(f"the params do not match the call: {exc}") from None
    parts = (found, found.tensor, *(tensor for _, tensor in found.inputs or ()))
    return sum(part is not None and part.fd >= 0 for part in parts)


def model_refused() -> UnsupportedOperation:
    """Return the error for a model in a descriptor."""
    return UnsupportedOperation(
        "this fleet loads no model from a descriptor: its file does not reach the nodes",
        hint="put the model into the models directory of each node, and load it by its name; or run"
        " a node on the entry's machine, and set its `descriptors` in fleet.toml",
    )
