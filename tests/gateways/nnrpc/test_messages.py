"""The messages of the RPC service: their bytes, and the modules generated from the .proto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.message import Message

from inferd.gateways.nnrpc import wasi_ephemeral_nn_pb2 as pb

FOLDER = Path(__file__).resolve().parents[3] / "gateways/nnrpc"


@pytest.mark.parametrize(
    ("message", "encoded"),
    [
        (pb.LoadByNameRequest(name="m"), "0a016d"),
        (pb.LoadByNameResult(graph_handle=1), "0801"),
        (pb.LoadByNameWithConfigRequest(name="m", config="{}"), "0a016d12027b7d"),
        (pb.LoadByNameWithConfigResult(graph_handle=300), "08ac02"),
        (pb.InitExecutionContextRequest(resource_handle=2), "0802"),
        (pb.InitExecutionContextResult(ctx_handle=3), "0803"),
        (
            pb.SetInputRequest(
                resource_handle=1,
                index=2,
                tensor=pb.Tensor(dimensions=[1, 300], ty=pb.BF16, data=b"hi"),
            ),
            "080110021a0b0a0301ac0210031a026869",
        ),
        (pb.ComputeRequest(resource_handle=1), "0801"),
        (pb.GetOutputRequest(resource_handle=1, index=2, output_max_size=3), "080110021803"),
        (pb.GetOutputResult(data=b"hi"), "0a026869"),
        (pb.FiniSingleRequest(resource_handle=1), "0801"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
def test_messages_have_the_bytes_of_wasmedge(message: Message, encoded: str) -> None:
    assert message.SerializeToString().hex() == encoded
    assert type(message).FromString(bytes.fromhex(encoded)) == message


def test_services_and_methods_have_the_names_of_wasmedge() -> None:
    services = pb.DESCRIPTOR.services_by_name
    names = {service.full_name: [m.name for m in service.methods] for service in services.values()}
    assert names == {
        "wasi_ephemeral_nn.Graph": ["LoadByName", "LoadByNameWithConfig"],
        "wasi_ephemeral_nn.GraphResource": ["InitExecutionContext"],
        "wasi_ephemeral_nn.GraphExecutionContextResource": [
            *("SetInput", "Compute", "ComputeSingle", "GetOutput", "GetOutputSingle", "FiniSingle"),
        ],
    }


def test_the_modules_are_generated_from_the_proto(tmp_path: Path) -> None:
    arguments = ("-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}")
    compiler = (sys.executable, "-m", "grpc_tools.protoc")
    subprocess.run((*compiler, *arguments, "wasi_ephemeral_nn.proto"), cwd=FOLDER, check=True)
    for generated in tmp_path.iterdir():
        assert generated.read_text() == (FOLDER / generated.name).read_text(), "make protobuf"
