"""The methods of WasmEdge's RPC service, for one client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeAlias

import anyio
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from ...backends.errors import InferdError, InvalidArgument, TooLarge
from ...backends.tensors import Tensor
from ..guests import Guest
from . import wasi_ephemeral_nn_pb2 as pb
from .limits import ERROR_CHARACTERS_MAX, OLD_OUTPUT_BYTES_MAX

Method: TypeAlias = Callable[[Any], Awaitable[Message]]


class RpcService:
    """The methods for one client. Calls for one context run one after the other, as in WasmEdge;
    those for different contexts run side by side.
    """

    def __init__(self, guest: Guest):
        self._guest = guest
        self._turns: dict[int, anyio.Lock] = {}

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers of grpclib by path."""
        guest = self._guest
        methods: dict[str, Method] = {
            "LoadByName": self._load_by_name,
            "LoadByNameWithConfig": self._load_by_name_with_config,
            "InitExecutionContext": self._init_execution_context,
            "SetInput": self._set_input,
            "Compute": self._on_context(guest.compute),
            "ComputeSingle": self._on_context(guest.compute_single),
            "GetOutput": self._reader(guest.get_output),
            "GetOutputSingle": self._reader(guest.get_output_single),
            "FiniSingle": self._on_context(guest.fini_single),
        }
        return {
            f"/{service.full_name}/{method.name}": Handler(
                _answering(method.name, methods[method.name]),
                Cardinality.UNARY_UNARY,
                GetMessageClass(method.input_type),
                GetMessageClass(method.output_type),
            )
            for service in pb.DESCRIPTOR.services_by_name.values()
            for method in service.methods
        }

    async def _load_by_name(self, request: pb.LoadByNameRequest) -> pb.LoadByNameResult:
        graph = await self._guest.load_by_name(request.name.encode())
        return pb.LoadByNameResult(graph_handle=graph)

    async def _load_by_name_with_config(
        self, request: pb.LoadByNameWithConfigRequest
    ) -> pb.LoadByNameWithConfigResult:
        graph = await self._guest.load_by_name(request.name.encode(), request.config.encode())
        return pb.LoadByNameWithConfigResult(graph_handle=graph)

    async def _init_execution_context(
        self, request: pb.InitExecutionContextRequest
    ) -> pb.InitExecutionContextResult:
        context = await self._guest.init_execution_context(request.resource_handle)
        self._turns[context] = anyio.Lock()
        return pb.InitExecutionContextResult(ctx_handle=context)

    def _turn(self, context: int) -> AbstractAsyncContextManager[object]:
        return self._turns.get(context, nullcontext())

    async def _set_input(self, request: pb.SetInputRequest) -> Empty:
        context, given = request.resource_handle, request.tensor
        # WasmEdge sends its own numbers, which are not those of the .proto.
        tensor = Tensor(given.data, tuple(given.dimensions), given.ty)
        async with self._turn(context):
            await self._guest.set_input(context, request.index, tensor)
        return Empty()

    def _on_context(self, call: Callable[[int], Awaitable[None]]) -> Method:
        async def method(request: pb.ComputeRequest | pb.FiniSingleRequest) -> Empty:
            async with self._turn(request.resource_handle):
                await call(request.resource_handle)
            return Empty()

        return method

    def _reader(self, read: Callable[[int, int], Awaitable[bytes]]) -> Method:
        async def method(request: pb.GetOutputRequest) -> pb.GetOutputResult:
            async with self._turn(request.resource_handle):
                data = await read(request.resource_handle, request.index)
            return pb.GetOutputResult(data=fitting(data, request.output_max_size))

        return method


def fitting(output: bytes, size_max: int) -> bytes:
    """Return *output* if it fits into the guest's buffer of *size_max*, which is 0 from old
    clients.

    :raises TooLarge: the output does not fit.
    """
    size_max = size_max or OLD_OUTPUT_BYTES_MAX
    if len(output) > size_max:
        raise TooLarge(
            f"an output of {len(output)} bytes does not fit into a buffer of {size_max}",
            hint="give a larger buffer",
            data={"needed": len(output)},
        )
    return output


def _answering(name: str, method: Method) -> Callable[[Stream[Any, Any]], Awaitable[None]]:
    """Return the method for grpclib: it answers with the result, or with an error's number."""

    async def answer(stream: Stream[Any, Any]) -> None:
        try:
            reply = await method(await _read_request(stream))
        except InferdError as exc:
            await _send_error(stream, name, exc)
        else:
            await stream.send_message(reply)

    return answer


async def _read_request(stream: Stream[Any, Any]) -> Any:
    try:
        request = await stream.recv_message()
    except NotImplementedError as exc:
        raise GRPCError(Status.UNIMPLEMENTED, str(exc)) from None  # the message is compressed
    except (DecodeError, AssertionError) as exc:  # grpclib asserts that a message is complete
        raise InvalidArgument(f"the request cannot be read: {exc}") from None
    if request is None:
        raise InvalidArgument("the request has no message")
    return request


async def _send_error(stream: Stream[Any, Any], name: str, error: InferdError) -> None:
    """Send an error as WasmEdge's own server does, with its number in the trailing metadata. If an
    output does not fit, the metadata also has its size, which WasmEdge does not read.
    """
    metadata = {"errno": str(error.wasi_number)}
    if "needed" in error.data:
        metadata["needed"] = str(error.data["needed"])
    text = f'failed to call "{name}", errno={error.wasi_number}: {error}'
    await stream.send_trailing_metadata(
        status=Status.UNKNOWN,
        status_message=text[:ERROR_CHARACTERS_MAX],
        metadata=metadata,
    )
