"""WasmEdge's side of its RPC: the official gRPC client, and a process that calls until its end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from inferd.gateways.nnrpc import wasi_ephemeral_nn_pb2 as pb
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd_process

CALL_S_MAX = 60.0
# Otherwise all channels of a process to one socket share a connection.
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
METHODS = {
    method.name: (
        f"/{service.full_name}/{method.name}",
        GetMessageClass(method.input_type),
        GetMessageClass(method.output_type),
    )
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


@contextmanager
def gateway(
    daemon: RunningDaemon, *options: str, listen: str = ""
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run `inferd nnrpc` and yield its socket's path and its process."""
    path = listen or str(daemon.directory / "nn.sock")
    arguments = ("nnrpc", "--listen", f"unix:{path}", *options)
    with inferd_process(*arguments, socket=daemon.socket) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline().decode()
            assert line == f"serving WasmEdge's RPC on unix:{path}\n", line
            yield path, process
        finally:
            process.kill()
            process.communicate()


class RpcError(Exception):
    """A call that failed: gRPC's status, WasmEdge's number of the error, and the text."""

    def __init__(self, error: Any):
        super().__init__(error.details())
        self.status = error.code().name
        metadata = dict(error.trailing_metadata() or ())
        self.number = int(metadata.get("errno", "5"))
        self.needed = int(metadata.get("needed", "0"))
        self.text = str(error.details())


class WasmEdge:
    """A client with a connection of its own."""

    def __init__(self, path: str):
        self.channel = grpc.insecure_channel(f"unix:{path}", options=OWN_CONNECTION)
        self._methods = {
            name: self.channel.unary_unary(
                route,
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )
            for name, (route, request, reply) in METHODS.items()
        }

    def __enter__(self) -> WasmEdge:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def begin(
        self, name: str, /, *, timeout: float = CALL_S_MAX, wait: bool = False, **fields: Any
    ) -> Any:
        """Begin a call and return its future; a call whose future is deleted is cancelled.

        With *wait*, it tries to connect again until the gateway accepts the connection.
        """
        request = METHODS[name][1](**fields)
        return self._methods[name].future(request, timeout=timeout, wait_for_ready=wait)

    def call(self, name: str, /, **fields: Any) -> Any:
        """Return the reply of a call; raise `RpcError` if it fails."""
        try:
            return self.begin(name, **fields).result()
        except grpc.RpcError as exc:
            raise RpcError(exc) from None

    def number(self, name: str, /, **fields: Any) -> int:
        """Return the number of a call's error, 0 without one."""
        try:
            self.call(name, **fields)
        except RpcError as exc:
            assert exc.status == "UNKNOWN", exc
            return exc.number
        return 0

    # Calls that have to succeed.

    def load(self, name: str = "echo", config: str | None = None) -> int:
        if config is None:
            return int(self.call("LoadByName", name=name).graph_handle)
        return int(self.call("LoadByNameWithConfig", name=name, config=config).graph_handle)

    def init(self, graph: int) -> int:
        return int(self.call("InitExecutionContext", resource_handle=graph).ctx_handle)

    def context(self, name: str = "echo", config: str | None = None) -> int:
        return self.init(self.load(name, config))

    def set_input(
        self,
        context: int,
        data: bytes,
        index: int = 0,
        kind: int = 3,
        dimensions: tuple[int, ...] = (1,),
    ) -> int:
        """Set an input, of a type by WasmEdge's number, and return the number of the error."""
        tensor = pb.Tensor(dimensions=dimensions, data=data)
        tensor.ty = kind  # type: ignore[assignment]
        return self.number("SetInput", resource_handle=context, index=index, tensor=tensor)

    def output(self, context: int, index: int = 0, *, single: bool = False) -> bytes:
        name = "GetOutputSingle" if single else "GetOutput"
        return bytes(self.call(name, resource_handle=context, index=index).data)

    def metadata(self, context: int) -> Any:
        return json.loads(self.output(context, 1))

    def compute(self, context: int) -> int:
        return self.number("Compute", resource_handle=context)

    def compute_single(self, context: int) -> int:
        return self.number("ComputeSingle", resource_handle=context)

    def pull(self, context: int, tokens: int) -> bytes:
        text = b""
        for _ in range(tokens):
            assert self.compute_single(context) == 0
            text += self.output(context, single=True)
        return text


# A client to be killed: it computes, whole turns or token by token, until then.
_VICTIM = """
import sys
from tests.gateways.nnrpc.driver import WasmEdge
path, model, call, text = sys.argv[1:]
with WasmEdge(path) as guest:
    context = guest.context(model)
    guest.set_input(context, text.encode())
    print("ready", flush=True)
    while guest.number(call, resource_handle=context) in (0, 100):
        print(call, flush=True)
"""


def victim(path: str, model: str, call: str, text: str) -> subprocess.Popen[bytes]:
    """Start a client that makes *call* again and again; it has printed a line when ready."""
    arguments = [sys.executable, "-c", _VICTIM, path, model, call, text]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process
