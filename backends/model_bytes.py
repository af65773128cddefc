"""The encodings of models by the first bytes of their files."""

from __future__ import annotations

from .gguf import MAGIC

BEGINNING_BYTES = 64
"""The bytes that `encoding_of_bytes` looks at."""
PYTORCH_HINT = (
    "a PyTorch model is a program, which inferd does not run: export it with"
    " `torch.onnx.export(model, (example_input,), 'NAME.onnx')`, and load the ONNX file"
)
TFLITE_MAGIC = b"TFL3"
"""It follows the first four bytes, which are the small offset of the file's first table."""
XML_BEGINNING, IR_ELEMENT = b"<?xml", b"<net"
"""The beginning of a graph of OpenVINO, and of its first element."""
_ONNX_BEGINNING = b"\x08"
_ZIP_MAGIC = b"PK\x03\x04"


PYTORCH_SUFFIXES = (".pt", ".pth")
PYTORCH_FILE = "it is a PyTorch model: export it to ONNX with `torch.onnx.export`"


def encoding_of_bytes(beginning: bytes) -> str:
    """Return the encoding of a file with this *beginning*; empty if it is not known.

    ONNX files, which have no mark, begin with the number of their version. TorchScript is a zip.
    """
    if beginning.startswith(MAGIC):
        return "ggml"
    if beginning[4:8] == TFLITE_MAGIC and 0 in beginning[:4]:
        return "tensorflowlite"
    if beginning.startswith(_ZIP_MAGIC):
        return "pytorch"
    if beginning.startswith((XML_BEGINNING, IR_ELEMENT)):
        return "openvino"
    return "onnx" if beginning.startswith(_ONNX_BEGINNING) else ""
