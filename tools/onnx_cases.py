"""ONNX's backend tests, as the daemon serves them: small graphs with inputs and expected outputs.

`python -m tools.onnx_cases` judges all cases by ONNX Runtime in this process and writes
`tests/onnx_cases.txt`. `python -m tools.onnx_cases --daemon` computes all served ones through a
daemon, each graph in a process of its own, and compares the bits with those of this process; it
takes some minutes. The tests compute a spread of them that has each operator and each type.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from inferd import Client, InferdError, Tensor
from inferd.backends.errors import LoadFailed
from inferd.backends.onnx.header import ELEMENT_TYPES, OnnxHeader, read_onnx_header
from inferd.backends.tensors import (
    ARRAY_TYPES,
    OTHER_TYPES,
    STRING,
    TENSOR_TYPES,
    TensorInfo,
    pack_strings,
)
from inferd.testing import running_daemon

__all__ = (
    "LIST",
    "SERVED",
    "Case",
    "cases",
    "compare_with_daemon",
    "difference",
    "features",
    "read_list",
    "refusal",
    "spread",
    "verdict",
)

LIST = Path(__file__).resolve().parent.parent / "tests" / "onnx_cases.txt"
KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
SERVED = "served"
"""The verdict on a case that ONNX Runtime passes, and whose types are served."""
THREADS = 3
"""Clients at once, while all cases are computed through a daemon."""
_TYPES = TENSOR_TYPES | OTHER_TYPES
_NUMBERS = {name: number for number, name in ELEMENT_TYPES.items()}


@dataclass
class Case:
    """A graph with sets of inputs and expected outputs, in the order of the file."""

    name: str
    model: bytes
    sets: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float


class Output(NamedTuple):
    """An output of a computation."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: bytes


@cache
def cases() -> Mapping[str, Case]:
    """Return all cases by their kinds and names; takes some seconds."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the generators of cases, which divide by zero
        np.random.seed(0)
        for kind in KINDS:
            for one in load_model_tests(kind=kind):
                name = f"{kind}/{one.name}"
                found[name] = _read_case(name, one)
    return dict(sorted(found.items()))


def _read_case(name: str, one: Any) -> Case:
    if one.model is not None:
        return Case(name, one.model.SerializeToString(), one.data_sets, one.rtol, one.atol)
    folder = Path(one.model_dir)
    sets = [
        (_read_tensors(data, "input"), _read_tensors(data, "output"))
        for data in sorted(folder.glob("test_data_set_*"))
    ]
    return Case(name, (folder / "model.onnx").read_bytes(), sets, one.rtol, one.atol)


def _read_tensors(folder: Path, kind: str) -> list[Any]:
    """Return the tensors in numbered files, or the bytes of other values."""
    found = []
    for number in range(len(list(folder.glob(f"{kind}_*.pb")))):
        data = (folder / f"{kind}_{number}.pb").read_bytes()
        try:
            found.append(numpy_helper.to_array(onnx.load_tensor_from_string(data)))
        except Exception:  # the value is not a tensor, as the graph's header states
            found.append(data)
    return found


def header_of(case: Case) -> OnnxHeader:
    """Return the inputs and outputs of a case's graph as the daemon reads them."""
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        file.write(case.model)
        file.flush()
        return read_onnx_header(file.name)


def refusal(case: Case) -> str:
    """Return the reason for which the daemon does not serve a case's graph, or empty."""
    try:
        header = header_of(case)
    except LoadFailed as exc:
        return f"file: {exc.message}"
    kinds = {info.type for info in (*header.inputs, *header.outputs)} - _TYPES.keys()
    return f"type: {', '.join(sorted(kinds))}" if kinds else ""


def verdict(case: Case) -> str:
    """Return `SERVED`, or the reason for which a case is not expected to pass."""
    reason = refusal(case)
    if reason:
        return reason
    try:
        session = session_of(case)
    except Exception as exc:  # the engine's errors have no common class
        return f"load: {_error_name(exc)}"
    for inputs, expected in case.sets:
        try:
            found = compute_here(case, session, inputs)
            if found != compute_here(case, session, inputs):
                return "engine: other results each time"
        except Exception as exc:  # the engine's errors have no common class
            return f"engine: {_error_name(exc)}"
        if not _is_expected(case, [array_of(one) for one in found], expected):
            return "engine: other results than ONNX's"
    return SERVED


def _error_name(exc: Exception) -> str:
    """Return the code in an engine's error, which is the same on all machines."""
    found = re.search(r"\b[A-Z]+(?:_[A-Z]+)+\b", str(exc))
    return found[0] if found else type(exc).__name__


def _is_expected(case: Case, found: Sequence[Any], expected: Sequence[Any]) -> bool:
    try:
        references = [_as_array(one) for one in expected]
        Runner.assert_similar_outputs(references, found, case.rtol, case.atol)
    except (AssertionError, TypeError):
        return False
    return True


def _as_array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value)


def session_of(case: Case) -> Any:
    """Return a session of ONNX Runtime with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(case.model, options, providers=["CPUExecutionProvider"])


def compute_here(case: Case, session: Any, inputs: Sequence[Any]) -> list[Output]:
    """Return the outputs of a case's *inputs* as ONNX Runtime computes them in this process."""
    header = header_of(case)
    arrays = [_as_array(one) for one in inputs]
    names = [info.name for info in header.outputs]
    feeds = {
        info.name: array if info.type == STRING else _value(info, array)
        for info, array in zip(header.inputs, arrays, strict=True)
    }
    if any(info.type == STRING for info in header.inputs):
        found = session.run(names, feeds)
    else:
        found = session.run_with_ort_values(names, feeds)
    return [_output(info, one) for info, one in zip(header.outputs, found, strict=True)]


def _value(info: TensorInfo, array: Any) -> Any:
    plain = np.ascontiguousarray(array).view(ARRAY_TYPES[info.type]).reshape(array.shape)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(plain, _NUMBERS[info.type])


def _output(info: TensorInfo, found: Any) -> Output:
    if isinstance(found, onnxruntime.OrtValue) and info.type != STRING:
        kind = ELEMENT_TYPES[found.element_type()]
        size = found.tensor_size_in_bytes()
        data = ctypes.string_at(found.data_ptr(), size) if size else b""
        return Output(info.name, kind, tuple(found.shape()), data)
    array = np.asarray(found.numpy() if isinstance(found, onnxruntime.OrtValue) else found)
    if info.type == STRING:
        return Output(info.name, STRING, array.shape, pack_strings(_encoded(array)))
    return Output(info.name, info.type, array.shape, array.tobytes())


def _encoded(array: Any) -> Iterator[bytes]:
    return (one if isinstance(one, bytes) else str(one).encode() for one in array.ravel().tolist())


def array_of(output: Output) -> Any:
    """Return an output as an array of NumPy."""
    from inferd.ipc.client import arrays

    tensor = Tensor(data=output.data, dimensions=list(output.shape), type=output.type)
    found = arrays.array_of(tensor)
    if output.type == "bf16":
        import ml_dtypes

        return found.astype(ml_dtypes.bfloat16)
    return found


def compute_with_daemon(client: Client, case: Case) -> list[list[Output]]:
    """Return the outputs of each of a case's sets of inputs, computed by a daemon, which loads the
    graph from its bytes and unloads it.

    :raises InferdError: the daemon refuses the graph or the inputs.
    """
    infos, found = header_of(case).inputs, []
    graph = client.load(case.model, encoding="onnx")
    try:
        context = client.init_execution_context(graph)
        for inputs, _ in case.sets:
            given = {
                info.name: _tensor(info, _as_array(one))
                for info, one in zip(infos, inputs, strict=True)
            }
            outputs = client.compute(context, given).outputs
            found.append([_read_output(name, tensor) for name, tensor in outputs])
        client.finalize_execution_context(context)
    finally:
        client.unload(graph)
    return found


def _tensor(info: TensorInfo, array: Any) -> Tensor:
    data = pack_strings(_encoded(array)) if info.type == STRING else array.tobytes()
    return Tensor(data=data, dimensions=list(array.shape), type=info.type)


def _read_output(name: str, tensor: Tensor) -> Output:
    kind = tensor.type
    if isinstance(kind, int):
        kind = next(name for name, number in _TYPES.items() if number == kind)
    return Output(name, kind, tuple(tensor.dimensions), tensor.data)


def difference(client: Client, case: Case) -> str:
    """Return how the daemon's results of a case differ from those of this process, or empty."""
    session = session_of(case)
    expected = [compute_here(case, session, inputs) for inputs, _ in case.sets]
    try:
        found = compute_with_daemon(client, case)
    except InferdError as exc:
        return f"{type(exc).__name__}: {exc.message}"
    for here, there in zip(expected, found, strict=True):
        for one, other in zip(here, there, strict=True):
            if one != other:
                return f"{one.name}: {one.type} {one.shape}, and {other.type} {other.shape}"
    return ""


def compare_with_daemon(socket: str, chosen: Sequence[Case]) -> dict[str, str]:
    """Return the differences of cases that have any, by their names; use several clients."""
    found, left, lock = dict[str, str](), list(chosen), threading.Lock()

    def work() -> None:
        with Client(socket) as client:
            while True:
                with lock:
                    if not left:
                        return
                    case = left.pop()
                if text := difference(client, case):
                    found[case.name] = text

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def features(case: Case) -> set[str]:
    """Return the traits of a case that a spread of cases shall have: operators, types of inputs and
    outputs, scalars, tensors without elements.
    """
    model = onnx.load_from_string(case.model)
    header = header_of(case)
    found = {f"operator {node.domain}/{node.op_type}" for node in model.graph.node}
    for kind, tensors in (("input", header.inputs), ("output", header.outputs)):
        for info in tensors:
            found.add(f"{kind} {info.type}")
            if info.shape == ():
                found.add(f"{kind} {info.type} scalar")
            if info.shape is not None and 0 in info.shape:
                found.add(f"{kind} {info.type} empty")
    return found


def spread(names: Sequence[str]) -> list[str]:
    """Return some of the cases *names*, which together have all features that all have. Each has
    the most features that the previous ones lack.
    """
    found = {name: features(cases()[name]) for name in names}
    missing, chosen = set[str]().union(*found.values()), list[str]()
    while missing:
        counts = {name: len(own & missing) for name, own in found.items()}
        chosen.append(max(counts, key=counts.__getitem__))
        missing -= found[chosen[-1]]
    return chosen


def read_list() -> tuple[dict[str, str], dict[str, str]]:
    """Return the versions of packages, and the verdicts on cases, of the list."""
    versions, verdicts = dict[str, str](), dict[str, str]()
    for line in LIST.read_text().splitlines():
        name, _, text = line.partition(" ")
        if name == "#":
            package, _, number = text.partition(" ")
            versions[package] = number
        else:
            verdicts[name] = text
    return versions, verdicts


def versions() -> dict[str, str]:
    """Return the versions of the packages that the verdicts depend on."""
    return {name: version(name) for name in ("onnx", "onnxruntime")}


def _write_list() -> None:
    lines = [f"# {name} {number}" for name, number in versions().items()]
    verdicts = {name: verdict(case) for name, case in cases().items()}
    lines += [f"{name} {text}" for name, text in verdicts.items()]
    LIST.write_text("\n".join(lines) + "\n")
    for text, count in Counter(verdicts.values()).most_common():
        print(f"{count:5} {text}")


def _run() -> int:
    served = [case for name, case in cases().items() if read_list()[1].get(name) == SERVED]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_daemon(models_dir=Path(folder)) as daemon,
    ):
        found = compare_with_daemon(daemon.socket, served)
    for name, text in sorted(found.items()):
        print(f"{name}: {text}")
    print(f"{len(served) - len(found)} of {len(served)} cases have the same bits as in one process")
    return bool(found)


def main() -> int:
    """Write the list, or compute its cases through a daemon."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--daemon", action="store_true", help="compute them through a daemon")
    arguments = parser.parse_args()
    if arguments.daemon:
        return _run()
    _write_list()
    return 0


if __name__ == "__main__":
    sys.exit(main())
