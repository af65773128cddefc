"""The fields of the protocol's requests."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from ....ipc.messages import INPUTS_MAX
from ..fields import FieldTable, honoured

OUTPUTS_MAX = 4096
CLASSES_MAX = 10_000
_Size = Annotated[int, Meta(ge=0)]
_ID_CHARACTERS_MAX = 1000


class TensorParameters(Struct, kw_only=True):
    """The place of a tensor in shared memory."""

    shared_memory_region: str | None = None
    shared_memory_byte_size: _Size | None = None
    shared_memory_offset: _Size = 0


class InputParameters(TensorParameters, kw_only=True):
    """The parameters of an input."""

    binary_data_size: _Size | None = None


class OutputParameters(TensorParameters, kw_only=True):
    """The parameters of a requested output."""

    binary_data: bool | None = None
    classification: Annotated[int, Meta(ge=0, le=CLASSES_MAX)] = 0


class RequestParameters(Struct, kw_only=True):
    """The parameters of a request."""

    binary_data_output: bool = False
    priority: _Size = 0
    timeout: _Size = 0
    sequence_id: int | str = 0


class InferInput(Struct, kw_only=True):
    """An input. Its `data` is read apart from the other fields."""

    name: str
    shape: Annotated[list[_Size], Meta(max_length=64)]
    datatype: str
    parameters: InputParameters | None = None
    data: list[Any] | None = None


class InferOutput(Struct, kw_only=True):
    """A requested output."""

    name: str
    parameters: OutputParameters | None = None


class InferRequest(Struct, kw_only=True):
    """A request for an inference."""

    inputs: Annotated[list[InferInput], Meta(max_length=INPUTS_MAX)]
    outputs: Annotated[list[InferOutput], Meta(max_length=OUTPUTS_MAX)] = []
    id: Annotated[str, Meta(max_length=_ID_CHARACTERS_MAX)] = ""
    parameters: RequestParameters | None = None


class IndexRequest(Struct, kw_only=True):
    """A request for the list of models."""

    ready: bool = False


class LoadRequest(Struct, kw_only=True):
    """A request to load a model."""

    parameters: dict[str, Any] | None = None


class RegisterRequest(Struct, kw_only=True):
    """A request to register a region of shared memory."""

    key: str
    byte_size: _Size
    offset: _Size = 0


_MODEL = "/v2/models/{model}"
_FIELDS = (
    honoured(
        "inputs",
        "`name`, `shape`, `datatype`, `data` or `parameters.binary_data_size` or a place in shared"
        " memory: `parameters.shared_memory_region`, `shared_memory_byte_size` and"
        " `shared_memory_offset`",
    ),
    honoured(
        "outputs",
        "`name`; `parameters`: `binary_data`, `classification`, or a place in shared memory;"
        " without it, all are returned",
    ),
    honoured("id", "returned in the response"),
    honoured(
        "parameters",
        "`binary_data_output`, `priority` (1 is `high`, 0 and 2 `normal`, above `low`; at most the"
        " caller's highest), `timeout` in µs",
    ),
)
INFER = FieldTable(f"{_MODEL}/infer", _FIELDS, kind=InferRequest)
INFER_VERSION = FieldTable(f"{_MODEL}/versions/{{version}}/infer", _FIELDS, kind=InferRequest)
INDEX = FieldTable(
    "/v2/repository/index",
    [honoured("ready", "list only the loaded models")],
    kind=IndexRequest,
)
_PARAMETERS = [honoured("parameters", "refused, except `unload_dependents`")]
LOAD = FieldTable("/v2/repository/models/{model}/load", _PARAMETERS, kind=LoadRequest)
UNLOAD = FieldTable("/v2/repository/models/{model}/unload", _PARAMETERS, kind=LoadRequest)
REGISTER = FieldTable(
    "/v2/systemsharedmemory/region/{region}/register",
    [
        honoured("key", "the name of a file in `/dev/shm` that belongs to the caller"),
        honoured("offset", "the first byte of the region in it"),
        honoured("byte_size", "the bytes of the region"),
    ],
    kind=RegisterRequest,
)
