from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FP16: _ClassVar[TensorType]
    FP32: _ClassVar[TensorType]
    FP64: _ClassVar[TensorType]
    BF16: _ClassVar[TensorType]
    U8: _ClassVar[TensorType]
    I32: _ClassVar[TensorType]
    I64: _ClassVar[TensorType]
FP16: TensorType
FP32: TensorType
FP64: TensorType
BF16: TensorType
U8: TensorType
I32: TensorType
I64: TensorType

class LoadByNameRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LoadByNameResult(_message.Message):
    __slots__ = ("graph_handle",)
    GRAPH_HANDLE_FIELD_NUMBER: _ClassVar[int]
    graph_handle: int
    def __init__(self, graph_handle: _Optional[int] = ...) -> None: ...

class LoadByNameWithConfigRequest(_message.Message):
    __slots__ = ("name", "config")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    name: str
    config: str
    def __init__(self, name: _Optional[str] = ..., config: _Optional[str] = ...) -> None: ...

class LoadByNameWithConfigResult(_message.Message):
    __slots__ = ("graph_handle",)
    GRAPH_HANDLE_FIELD_NUMBER: _ClassVar[int]
    graph_handle: int
    def __init__(self, graph_handle: _Optional[int] = ...) -> None: ...

class InitExecutionContextRequest(_message.Message):
    __slots__ = ("resource_handle",)
    RESOURCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    resource_handle: int
    def __init__(self, resource_handle: _Optional[int] = ...) -> None: ...

class InitExecutionContextResult(_message.Message):
    __slots__ = ("ctx_handle",)
    CTX_HANDLE_FIELD_NUMBER: _ClassVar[int]
    ctx_handle: int
    def __init__(self, ctx_handle: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dimensions", "ty", "data")
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    TY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dimensions: _containers.RepeatedScalarFieldContainer[int]
    ty: TensorType
    data: bytes
    def __init__(self, dimensions: _Optional[_Iterable[int]] = ..., ty: _Optional[_Union[TensorType, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class SetInputRequest(_message.Message):
    __slots__ = ("resource_handle", "index", "tensor")
    RESOURCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    resource_handle: int
    index: int
    tensor: Tensor
    def __init__(self, resource_handle: _Optional[int] = ..., index: _Optional[int] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class ComputeRequest(_message.Message):
    __slots__ = ("resource_handle",)
    RESOURCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    resource_handle: int
    def __init__(self, resource_handle: _Optional[int] = ...) -> None: ...

class GetOutputRequest(_message.Message):
    __slots__ = ("resource_handle", "index", "output_max_size")
    RESOURCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_MAX_SIZE_FIELD_NUMBER: _ClassVar[int]
    resource_handle: int
    index: int
    output_max_size: int
    def __init__(self, resource_handle: _Optional[int] = ..., index: _Optional[int] = ..., output_max_size: _Optional[int] = ...) -> None: ...

class GetOutputResult(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class FiniSingleRequest(_message.Message):
    __slots__ = ("resource_handle",)
    RESOURCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    resource_handle: int
    def __init__(self, resource_handle: _Optional[int] = ...) -> None: ...
