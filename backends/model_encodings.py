"""The encodings of models: the first bytes of their files, and the files of a graph, which has
several in some formats.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from .gguf import MAGIC

SAVED_MODEL = "saved_model.pb"
"""The file by which a SavedModel folder of TensorFlow is recognised."""
IR_SUFFIX = ".xml"
"""OpenVINO's format has the graph in `NAME.xml`, and the weights in `NAME.bin`."""
FOLDER_FILES = (SAVED_MODEL, "model.xml", "model.onnx", "model.tflite")
"""The names of a model's file in a folder of its own, the preferred one first."""
VARIABLE_FILES_MAX = 1000


def files_of_graph(file: Path) -> list[Path]:
    """Return the files of the graph in *file*, without those that an ONNX file names."""
    if file.name == SAVED_MODEL:
        return [file, *_variables(file.parent / "variables")]
    weights = weights_of(file)
    return [file, Path(weights)] if weights else [file]


def weights_of(file: str | os.PathLike[str]) -> str:
    """Return the path of the weights of a graph of OpenVINO; empty for another file, or if there
    are none.
    """
    stem, suffix = os.path.splitext(file)
    weights = f"{stem}.bin"
    return weights if suffix.lower() == IR_SUFFIX and os.path.isfile(weights) else ""


def model_in_folder(folder: Path) -> Path | None:
    """Return the model's file in a folder that holds a model; None if it holds none."""
    if not os.path.isdir(folder):
        return None
    files = (folder / name for name in FOLDER_FILES)
    return next((file for file in files if os.path.isfile(file)), None)


def _variables(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(one) for one in islice(entries, VARIABLE_FILES_MAX) if one.is_file())
    except OSError:  # a graph may have none; the engine reports a folder that cannot be read
        return []


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
