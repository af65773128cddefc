"""Triton's extension for shared memory: regions of a caller, and the tensors in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....backends.errors import TooLarge, UnsupportedOperation
from ....ipc.names import OWN_USER
from ..exchange import Exchange
from ..fields import field_error
from ..limits import TENSORS_BYTES_MAX
from ..shared_memory import RegionOwner, RegionPart, no_region, unknown_user
from .fields import (
    REGISTER,
    InferInput,
    InferOutput,
    InferRequest,
    InputParameters,
    OutputParameters,
    TensorParameters,
)


def _find_owner(exchange: Exchange) -> RegionOwner | None:
    """Return the owner of the caller's regions, or None if its user is not known for certain."""
    caller, uid = exchange.caller, exchange.link.uid
    if caller.name:
        # The peer may be a proxy: with keys, the operator has named the user.
        user = caller.user.on_behalf_of
        return RegionOwner(caller.name, user) if user and not user.startswith(OWN_USER) else None
    return None if uid is None else RegionOwner("", str(uid))


def _owner_of(exchange: Exchange) -> RegionOwner:
    exchange.turns.regions.check_enabled()
    owner = _find_owner(exchange)
    if owner is None:
        raise unknown_user()
    return owner


async def register_region(exchange: Exchange) -> None:
    """Register a region of the caller's own shared memory.

    :raises InferdError: it cannot be used; see `SharedRegions.register`.
    """
    owner = _owner_of(exchange)
    fields, _ = exchange.read_fields(REGISTER)
    if owner.key:  # the daemon decides for whom the gateway may act
        async with exchange.turns.pool.lease(exchange.caller) as client:
            await client.models()
    await exchange.turns.regions.register(
        owner, exchange.params["region"], fields.key, fields.offset, fields.byte_size
    )
    await exchange.send_json({})


async def answer_regions(exchange: Exchange) -> None:
    """Answer with the caller's regions, or one of them.

    :raises NotFound: the caller has no such region.
    """
    owner, name = _find_owner(exchange), exchange.params.get("region")
    regions = {} if owner is None else exchange.turns.regions.regions_of(owner)
    if name is not None and name not in regions:
        raise no_region(name)
    found = regions.values() if name is None else [regions[name]]
    await exchange.send_json([region.description for region in found])


async def unregister_regions(exchange: Exchange) -> None:
    """Forget one of the caller's regions, or all."""
    owner = _find_owner(exchange)
    if owner is not None:
        exchange.turns.regions.unregister(owner, exchange.params.get("region"))
    await exchange.send_json({})


async def answer_no_regions(exchange: Exchange) -> None:
    """Answer that there are no regions of CUDA, or for one that it does not exist."""
    if "region" in exchange.params:
        raise no_region(exchange.params["region"])
    await exchange.send_json([])


async def forget_no_regions(exchange: Exchange) -> None:
    """Answer that no regions of CUDA are registered."""
    await exchange.send_json({})


async def refuse_region(exchange: Exchange) -> None:
    """Refuse to register a region of CUDA.

    :raises UnsupportedOperation: always.
    """
    raise UnsupportedOperation(
        "the shared memory of CUDA is not supported",
        hint="use system shared memory, or send tensors in the request",
    )


class SharedTensors(NamedTuple):
    """The parts of regions that a request names, by the numbers of its inputs and outputs."""

    inputs: dict[int, RegionPart]
    outputs: dict[int, RegionPart]


_NO_TENSORS = SharedTensors({}, {})


def find_shared(exchange: Exchange, request: InferRequest) -> SharedTensors:
    """Return the parts of regions that a request names.

    :raises NotFound: the caller has no such region.
    :raises InvalidArgument: a part does not lie within its region.
    """
    named = _in_regions(request.inputs), _in_regions(request.outputs)
    if not any(named):
        return _NO_TENSORS
    for number, options in named[1].items():
        if isinstance(options, OutputParameters) and options.classification:
            raise field_error(
                f"outputs.{number}.parameters.classification",
                "classes of an output are not written to shared memory",
                hint="request the output without them, or without shared memory",
            )
    owner = _owner_of(exchange)
    inputs, outputs = (
        {
            number: _part_of(exchange, owner, parameters, f"{place}.{number}.parameters")
            for number, parameters in found.items()
        }
        for place, found in zip(("inputs", "outputs"), named, strict=True)
    )
    return SharedTensors(inputs, outputs)


def _in_regions(
    tensors: Sequence[InferInput | InferOutput],
) -> dict[int, InputParameters | OutputParameters]:
    return {
        number: each.parameters
        for number, each in enumerate(tensors)
        if each.parameters is not None and each.parameters.shared_memory_region is not None
    }


def _part_of(
    exchange: Exchange, owner: RegionOwner, parameters: TensorParameters, place: str
) -> RegionPart:
    name, size = parameters.shared_memory_region, parameters.shared_memory_byte_size
    assert name is not None, "the caller has checked it"
    if size is None:
        place = f"{place}.shared_memory_byte_size"
        raise field_error(place, f"{place}: it is absent")
    region = exchange.turns.regions.find_region(owner, name)
    return region.part(parameters.shared_memory_offset, size)


async def read_shared(exchange: Exchange, shared: SharedTensors) -> dict[int, bytes]:
    """Return copies of the inputs in regions.

    :raises TooLarge: they have more bytes than a request may have.
    :raises InvalidArgument: the file of a region was cut off.
    """
    size = sum(part.size for part in shared.inputs.values())
    if size > TENSORS_BYTES_MAX:
        raise TooLarge(
            f"the inputs in shared memory have {size} bytes; {TENSORS_BYTES_MAX} are allowed",
            hint="send smaller tensors",
            data={"bytes": size, "bytes_max": TENSORS_BYTES_MAX},
        )
    await exchange.take_memory(size)
    return {number: await part.read() for number, part in shared.inputs.items()}
