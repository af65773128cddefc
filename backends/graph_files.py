"""The files of a graph's model, which has several in some formats."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

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
