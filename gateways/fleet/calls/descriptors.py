"""The detection of params that refer to descriptors, which cannot be sent to another machine."""

from __future__ import annotations

import msgspec

from ....backends.errors import InvalidArgument, UnsupportedOperation


class _Part(msgspec.Struct):
    fd: int = -1


class _TensorParams(_Part):
    tensor: _Part | None = None
    inputs: list[tuple[str, _Part]] | None = None


_params = msgspec.msgpack.Decoder(_TensorParams)


def refuse_descriptors(params: msgspec.Raw) -> None:
    """Check that no part of params is in a descriptor.

    :raises UnsupportedOperation: one is.
    :raises InvalidArgument: the params have other types.
    """
    try:
        found = _params.decode(params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidArgument(f"the params do not match the call: {exc}") from None
    parts = (found, found.tensor, *(tensor for _, tensor in found.inputs or ()))
    if any(part is not None and part.fd >= 0 for part in parts):
        raise UnsupportedOperation(
            "a fleet takes no descriptors: they do not reach other machines",
            hint="send tensors within the frame, up to 1 MiB, and put models into the models"
            " directory of each node",
        )
