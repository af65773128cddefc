"""Calls on models: graphs, which are leases of clients, and operations by a model's name."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import anyio
from msgspec.structs import asdict

from ...backends import ENGINES, FILE_FORMATS, format_of_backend, format_of_file
from ...backends.errors import (
    InvalidArgument,
    InvalidEncoding,
    LoadFailed,
    Timeout,
    TooLarge,
    UnsupportedOperation,
)
from ...backends.model_encodings import BEGINNING_BYTES, PYTORCH_HINT, encoding_of_bytes
from ...backends.params import (
    BY_NAME,
    MMPROJ_AUTO,
    MMPROJ_NONE,
    Options,
    adjust_parameters,
    differing_values,
    overflow_beside,
    parse_json_options,
)
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ...scheduler.owner import Priority
from ..core import Daemon
from ..media.settings import has_encoder
from ..metrics.daemon_counters import label_of
from ..models import model_adapters
from ..models.catalog import NamedModel, other_name_refused
from ..models.description import describe_model, show_model
from ..models.draft_gains import NO_GAIN
from ..models.model import ManagedModel, PassedFile
from ..models.model_files import files_in_use, identity_of
from ..models.projectors import HOW_TO_GET, HOW_TO_PASS
from ..models.registry import Lease
from ..residency.residency import ResidencyRequest
from ..workers.process_client import ProcessClient
from .arguments import metadata_text, number_of

MEMORY_POLICY = ("ctx-shift", "n-keep", "n-discard")
"""The parameters of turns in the configuration of wasi_nn_backend."""
BACKEND_DEFAULTS: dict[str, Any] = {
    "ctx-shift": True,
    "ctx-size": 2048,
    "n-predict": 512,
    "seed": 1234,
    "temp": 0.7,
    "top-k": -1,
    "min-p": 0.0,
    "min-keep": 1,
    "repeat-penalty": 1.1,
    "last-n-penalty": -1,
    "dry-penalty-last-n": -1,
}
"""The defaults of wasi_nn_backend (`parse_config_to_params`) that differ from the daemon's."""
PRELOAD = b"preload:"
_BACKENDS = {one.encoding: one.backends[0] for one in FILE_FORMATS}
"""The default backends by the encodings that are served."""
NAME_BYTES_MAX = 4095
_SEALS_REQUIRED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK


async def load(daemon: Daemon, request: Request) -> w.GraphResult:
    """Load a model by its name in the first builder, or by a descriptor of its file."""
    p: w.LoadParams = request.params
    try:
        number = number_of(p.encoding, w.ENCODINGS, "encoding")
    except InvalidArgument as exc:
        raise InvalidEncoding(exc.message) from None
    encoding = next((n for n, v in w.ENCODINGS.items() if v == number), str(number))
    if encoding not in ("autodetect", *_BACKENDS):
        raise _not_served(encoding)
    options = parse_json_options(metadata_text(p.builders[1])) if len(p.builders) > 1 else Options()
    _apply_target(number_of(p.target, w.TARGETS, "target"), options)
    if p.fd >= 0:
        if encoding == "tensorflow":
            raise InvalidEncoding(
                "a SavedModel of TensorFlow is a folder, and not a file",
                hint="put the folder into the models directory, and load it by its name",
            )
        file = await _take_file(request, p.fd)
        if encoding == "autodetect":
            encoding = await _read_encoding(daemon, request, file)
        if encoding not in _BACKENDS:
            file.close()
            raise _not_served(encoding)
        if p.weights is not None:
            file = await _add_weights(request, file, p.weights.fd, encoding)
        name = f"descriptor-{daemon.new_handle():x}"
        quota = daemon.connections.access.quota_of(request.owner.user)
        backend = _BACKENDS[encoding]
        lease = daemon.registry.lease_descriptor(name, file, request.owner.user, quota, backend)
    else:
        lease = _lease(daemon, request, _builder_name(p.builders))
        _check_encoding(encoding, lease)
    return await _open_graph(daemon, request, lease, options)


def _not_served(encoding: str) -> InvalidEncoding:
    advice = f"use {', '.join(_BACKENDS)} or autodetect"
    return InvalidEncoding(
        f"models of the encoding {encoding} are not supported",
        hint=PYTORCH_HINT if encoding == "pytorch" else advice,
    )


def _check_encoding(encoding: str, lease: Lease) -> None:
    """Check that a model has the *encoding* that a call has named.

    :raises InvalidEncoding: it has another one.
    """
    file, backend = lease.model.config.file, lease.model.config.backend
    own = (format_of_backend(backend) if file is None else format_of_file(file.name)).encoding
    if encoding not in ("autodetect", own):
        lease.close()
        raise InvalidEncoding(
            f"the encoding of {lease.name!r} is {own}, and not {encoding}",
            hint=f"load it with {own} or autodetect",
        )


async def _read_encoding(daemon: Daemon, request: Request, file: PassedFile) -> str:
    """Return the encoding of a passed file, or close the file, which no model has yet.

    :raises LoadFailed: its file system does not answer.
    """
    try:
        with anyio.fail_after(daemon.config.worker_hang_timeout_s):
            return await request.connection.user.run(_encoding_of, file.fd)
    except BaseException as exc:
        file.close()
        if not isinstance(exc, (TimeoutError, Timeout)):
            raise
        raise LoadFailed(
            "the passed file could not be read, because its file system does not answer",
            hint="pass a memfd, or a file on a file system that answers",
            data={"cause": "silent"},
        ) from None


def _encoding_of(fd: int) -> str:
    """Return the encoding of a passed file. Why a file cannot be read, or is of no known kind, is
    said at its load.
    """
    try:
        return encoding_of_bytes(os.pread(fd, BEGINNING_BYTES, 0)) or "ggml"
    except OSError:
        return "ggml"


def _lease(daemon: Daemon, request: Request, name: str) -> Lease:
    allowed = daemon.connections.access.models_of(request.connection)
    return daemon.registry.lease(name, request.owner.user, allowed)


def _apply_target(target: int, options: Options) -> None:
    if target in (w.TARGETS["tpu"], w.TARGETS["npu"]):
        raise UnsupportedOperation(
            f"there is no {'tpu' if target == w.TARGETS['tpu'] else 'npu'} here",
            hint="use the target cpu, gpu or auto",
        )
    if target == w.TARGETS["cpu"]:
        options.values["n-gpu-layers"] = 0
    elif target == w.TARGETS["gpu"]:
        options.values.setdefault("n-gpu-layers", -1)
    elif target != w.TARGETS["auto"]:
        raise InvalidArgument(
            f"there is no target {target}", hint="use 0 (cpu), 1 (gpu) or 3 (auto)"
        )


def _builder_name(builders: list[bytes]) -> str:
    if not builders:
        raise InvalidArgument("load got no builder and no descriptor", hint="name a model")
    first = builders[0].rstrip(b"\0").removeprefix(PRELOAD)
    if len(first) > NAME_BYTES_MAX:
        raise TooLarge(
            f"a builder of {len(first)} bytes in the frame",
            hint="name a loaded model, or pass the model's bytes in a memfd (`fd`)",
            data={"bytes": len(first)},
        )
    try:
        return first.decode()
    except UnicodeDecodeError:
        raise InvalidArgument("the builder is not a model name") from None


async def _take_file(request: Request, fd: int) -> PassedFile:
    """Return the file that was passed with a request, for the model to keep."""
    user = request.connection.user
    status = await user.run(check_passed_file, fd)
    request.take_descriptor(fd)
    return PassedFile(fd, status.st_size, identity_of(status), partial(user.close, (fd,)))


async def _add_weights(request: Request, file: PassedFile, fd: int, encoding: str) -> PassedFile:
    """Return a passed *file* with its weights in another one; close it if that is refused."""
    try:
        if encoding != "openvino":
            raise InvalidArgument(
                f"a model of the encoding {encoding} has one file", hint="send it without `weights`"
            )
        if fd < 0:
            raise InvalidArgument("the weights are in no descriptor", hint="send them in a memfd")
        weights = await _take_file(request, fd)
    except BaseException:
        file.close()
        raise

    def close() -> None:
        file.close()
        weights.close()

    return PassedFile(
        file.fd,
        file.size_bytes + weights.size_bytes,
        (*file.identity, *weights.identity),
        close,
        weights_fd=weights.fd,
    )


def check_passed_file(fd: int) -> os.stat_result:
    """Return the status of the file behind *fd*, which must not be open for writing."""
    status, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument("the descriptor is not a regular file", hint="pass a GGUF file")
    if flags & os.O_ACCMODE != os.O_RDONLY and not _sealed(fd):
        raise InvalidArgument(
            "the descriptor can be written to",
            hint="open the file read-only, or seal the memfd (F_SEAL_WRITE, F_SEAL_SHRINK)",
        )
    return status


def _sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS_REQUIRED == _SEALS_REQUIRED
    except OSError:
        return False  # only a memfd has seals


async def load_by_name(daemon: Daemon, request: Request) -> w.GraphResult:
    """Load a model by its name, with JSON parameters for this graph if the call has a `config`."""
    p: w.LoadByNameParams | w.LoadByNameWithConfigParams = request.params
    config = getattr(p, "config", None)
    options = Options() if config is None else parse_json_options(metadata_text(config))
    return await _open_graph(daemon, request, _lease(daemon, request, p.name), options)


load_by_name_with_config = load_by_name


def _check_draft_model(
    daemon: Daemon, request: Request, lease: Lease, values: Mapping[str, Any]
) -> None:
    """Check that the user may use the model that *values* name to draft, if it is to be loaded.

    :raises ModelNotFound: the user sees no such model.
    """
    named = values.get("draft-model", "")
    if named and lease.loaded is None:
        allowed = daemon.connections.access.models_of(request.connection)
        daemon.registry.catalog.find(named, request.owner.user, allowed)


async def _open_graph(
    daemon: Daemon, request: Request, lease: Lease, options: Options
) -> w.GraphResult:
    """Load the leased model if needed, then publish the graph.

    :raises InvalidArgument: the parameters contradict each other, or those of the configuration.
    """
    own, backend = options.level("context", "request"), daemon.graphs.backend_of(request.connection)
    with daemon.graphs.opening(request.connection, lease, options) as graph:
        daemon.check_open()
        adjust_parameters(backend | lease.options() | own)
        _check_draft_model(daemon, request, lease, options.values)
        lease.note_requested(options.values)
        now = daemon.registry.seconds()
        gate_request = ResidencyRequest(Priority.NORMAL, now, user=request.owner.user)
        on_progress = partial(_send_progress, request) if request.params.progress else None
        async with daemon.registry.loader.admit(lease.model, gate_request, on_progress):
            worker = await lease.ready()
        info, requested, configured = worker.info, options.level("model"), lease.options()
        check_projector(lease, requested)
        configured = configured | overflow_beside({}, configured)
        in_force = _values_in_force(lease, worker, configured)
        graph.not_applied = _not_applied(requested, configured | in_force, lease.model.fitted)
        defaults = {k: v for k, v in backend.items() if k not in configured | requested}
        layers = {"file": info.sampling, "model": configured, "backend": defaults}
        origins = {k: origin for origin, values in layers.items() for k in values}
        graph.origins = {k: v for k, v in origins.items() if k not in own}
        graph.options = info.sampling | configured | in_force | defaults
        graph.options |= {**own, **overflow_beside(graph.options, own)}
        size = requested.get("ctx-size") or defaults.get("ctx-size", in_force["ctx-size"])
        graph.options["ctx-size"] = min(size, in_force["ctx-size"])
    return w.GraphResult(
        graph=graph.handle,
        model=lease.name,
        fingerprint=info.fingerprint,
        ctx_size=graph.options["ctx-size"],
        slots=info.slots,
        special_tokens={n: asdict(token) for n, token in info.special_tokens.items()},
        not_applied=graph.not_applied,
        ignored=graph.ignored,
        adjusted=graph.adjusted,
        tensors=info.computes_tensors,
    )


def _send_progress(request: Request, fraction: float) -> None:
    request.emit(w.ProgressEvent(progress=fraction))


def _values_in_force(
    lease: Lease, worker: ProcessClient, configured: dict[str, Any]
) -> dict[str, Any]:
    """Return the context's size, and the model-level values of a load that differ from the
    configured ones. Each entry counts in the memory of the user's sessions.
    """
    info, spec, model = worker.info, worker.spec, lease.model
    of_name = configured.get("ctx-size", 0) if lease.name != lease.base else 0
    values = {
        "ctx-size": min(of_name or info.ctx_size, info.ctx_size),
        "batch-size": info.batch_size,
        "slots": info.slots,
        "n-gpu-layers": info.n_gpu_layers,
        "main-gpu": spec.main_gpu if info.n_gpu_layers else -1,
        "tensor-split": list(spec.tensor_split) if info.n_gpu_layers else [],
        "threads": spec.threads,
        "keep-alive": model.keep_alive_s,
        "mmproj": spec.mmproj or configured.get("mmproj", MMPROJ_AUTO),
        "draft-model": model.draft.name if spec.draft_model else "",
    }
    return {
        name: value
        for name, value in values.items()
        if name == "ctx-size" or value != configured.get(name, BY_NAME[name].default)
    }


def check_projector(lease: Lease, values: Mapping[str, Any]) -> None:
    """Check that a loaded model has a projector if a client's *values* name one.

    :raises InvalidArgument: it has none. WasmEdge has this number for an image without a projector.
    """
    named, client = values.get("mmproj", ""), lease.loaded
    if named in ("", MMPROJ_AUTO, MMPROJ_NONE) or client is None or has_encoder(client.spec):
        return
    note = lease.model.projector.note
    passed = lease.model.uid is not None
    model = "a model that is passed as a file" if passed else repr(lease.name)
    raise InvalidArgument(
        f"mmproj: {model} has no projector" + (f": {note}" if note else ""),
        hint=HOW_TO_PASS if passed else HOW_TO_GET,
        data={"requested": PurePath(named).name[:100]},
    )


def _not_applied(
    requested: dict[str, Any], values: dict[str, Any], fitted: dict[str, int]
) -> dict[str, Any]:
    """Return the model-level *values* in force that differ from the requested ones, or that replace
    defaults for which memory did not suffice (*fitted*). A graph may have a smaller context than
    the worker; only the operator sets the other values.
    """
    size, size_max = requested.get("ctx-size", 0), values["ctx-size"]
    applied = {"ctx-size"} if 0 < size <= size_max else set()
    different = differing_values({k: v for k, v in requested.items() if k != "ctx-size"}, values)
    larger = {"ctx-size": size_max} if size > size_max else {}
    return {k: v for k, v in fitted.items() if k not in applied} | different | larger


async def unload(daemon: Daemon, request: Request) -> w.Empty:
    """End the lease, its kept tensors, and its contexts, whose outputs can still be read. Unless
    `keep` is set, unload the model before returning if nothing uses it.
    """
    graph = daemon.graph(request)
    daemon.graphs.remove_graph(graph)
    for session in daemon.sessions.live:
        if session.model is graph.lease:
            session.unload()
    daemon.kept_tensors.end_lease(request.connection, graph.lease)
    model = graph.lease.model
    graph.lease.close()
    if not model.busy and not model.pinned and not request.params.keep:
        await model.unload()
    return w.Empty()


async def init_backend(daemon: Daemon, request: Request) -> w.InitBackendResult:
    """Set the defaults of the connection's later graphs to those of wasi_nn_backend, with the
    memory policy in the configuration. Return the other keys of the configuration; they are
    ignored, because only the operator sets them.
    """
    options = parse_json_options(metadata_text(request.params.config))
    policy = {k: v for k, v in options.values.items() if k in MEMORY_POLICY}
    daemon.graphs.set_backend(request.connection, BACKEND_DEFAULTS | policy)
    return w.InitBackendResult(ignored=sorted({*options.ignored, *options.values} - policy.keys()))


async def deinit_backend(daemon: Daemon, request: Request) -> w.Empty:
    """Close the connection's sessions, tensors, buffers and graphs."""
    for session in daemon.sessions.live.sessions_of(request.connection):
        await daemon.sessions.close_session(session)
    daemon.kept_tensors.close_connection(request.connection)
    daemon.buffers.close_connection(request.connection)
    daemon.graphs.close_graphs(request.connection)
    return w.Empty()


async def models(daemon: Daemon, request: Request) -> w.ModelsResult:
    """List the models."""
    registry, catalog = daemon.registry, daemon.registry.catalog
    await catalog.refresh()
    allowed = daemon.connections.access.models_of(request.connection)
    listed = catalog.listed_to(request.owner.user, allowed)
    await registry.projectors.read([registry.projector_wish(one.model) for one in listed])

    def describe(named: NamedModel) -> w.ModelInfo:
        facts = registry.file_facts.known_facts(_gguf_files(named.model))
        return describe_model(registry, named, facts)

    files = catalog.files_not_offered() if request.params.all_files else []
    return w.ModelsResult(
        models=[describe(named) for named in listed],
        not_offered=[{"file": one.file, "reason": one.reason} for one in files],
    )


async def show(daemon: Daemon, request: Request) -> w.ModelsResult:
    """Describe one model, with the facts that its file's header states."""
    named = daemon.find_model(request, request.params.name)
    model = named.model
    facts, declared, cause = None, None, None
    try:
        if files := _gguf_files(model):
            facts = await daemon.registry.file_facts.facts_of(files)
        elif model.loaded is None and model.config.file is not None:
            backend, file = model.config.backend, model.config.file
            declared = await daemon.registry.declared_tensors.tensors_of(backend, file)
    except LoadFailed as exc:
        cause = exc.message
    await daemon.registry.projectors.read([daemon.registry.projector_wish(model)])
    gain = daemon.draft_gains.gain_of(label_of(model)) if model.uid is None else NO_GAIN
    shown = show_model(daemon.registry, named, facts, declared, cause, gain)
    return w.ModelsResult(models=[shown])


def _gguf_files(model: ManagedModel) -> list[Path]:
    """Return the files of a model whose headers state facts."""
    return [] if ENGINES[model.config.backend].graphs else files_in_use(model.config.file)


async def unload_model(daemon: Daemon, request: Request) -> w.Empty:
    """Unload a model."""
    p: w.NamesParams = request.params
    await daemon.registry.unload_model(daemon.find_model(request, p.name), force=p.force)
    return w.Empty()


async def pin(daemon: Daemon, request: Request) -> w.Empty:
    """Pin a model."""
    model = daemon.find_model(request, request.params.name).model
    daemon.registry.pin_model(model, pinned=True)
    return w.Empty()


async def unpin(daemon: Daemon, request: Request) -> w.Empty:
    """Unpin a model."""
    model = daemon.find_model(request, request.params.name).model
    daemon.registry.pin_model(model, pinned=False)
    return w.Empty()


async def swap(daemon: Daemon, request: Request) -> w.SwapResult:
    """Replace the model that a name stands for; return once new turns begin on the new model."""
    daemon.check_open()
    p: w.SwapParams = request.params
    catalog = daemon.registry.catalog
    named = daemon.find_model(request, p.name)
    model = named.model
    if named.is_derived:
        raise other_name_refused(named.name, model.name)
    config = catalog.swap_target(model, p.to, request.owner.user)
    to = "" if catalog.names_itself(model, p.to) else p.to
    return await daemon.swaps.swap(model, config, p.mode, to=to, force=p.force)


async def add_adapter(daemon: Daemon, request: Request) -> w.AddAdapterResult:
    """Add an adapter to a model."""
    daemon.check_open()
    p: w.AddAdapterParams = request.params
    model = daemon.find_model(request, p.name).model
    report = await model_adapters.add_adapter(daemon.registry, model, p.adapter, p.file, p.scale)
    if report is None or report.info is None:
        return w.AddAdapterResult()
    return w.AddAdapterResult(loaded=True, id=report.info.id, size_bytes=report.info.size_bytes)


async def remove_adapter(daemon: Daemon, request: Request) -> w.Empty:
    """Remove an adapter from a model."""
    p: w.RemoveAdapterParams = request.params
    model = daemon.find_model(request, p.name).model
    await model_adapters.remove_adapter(daemon.registry, model, p.adapter, force=p.force)
    return w.Empty()
