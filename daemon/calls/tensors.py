"""Tensors of the wasi-nn calls: prompts and parameters of a language model, or a model's inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import anyio
import msgspec

from ...backends import tensors as t
from ...backends.base import ModelInfo
from ...backends.errors import (
    Busy,
    Cancelled,
    InferdError,
    InvalidArgument,
    SessionBusy,
    Timeout,
    TooLarge,
    WorkerCrashed,
)
from ...ipc import messages as w
from ...ipc.server.buffers import Buffer
from ...ipc.server.connection import Request
from ...ipc.server.request_bytes import COPIES
from ...scheduler import messages as m
from ...scheduler.channels import reply_too_large
from ...scheduler.messages import ComputedTensors
from ...scheduler.owner import Requester
from ...sessions import Session, WorkerClient
from ...wire.frames import REPLY_BYTES_MAX
from ..core import Daemon
from ..kept_tensors import KeptTensor
from ..models.registry import Lease
from ..workers.deaths import GUILTY, SUSPECT
from .arguments import priority_of, seconds_of, tensor_bytes, tensor_type

CONFIGURATION_NAMES = ("1", "metadata", "options", "config")
"""Names of the inputs of type u8 that are a language model's parameters as JSON."""
GRAPH_DEATHS_MAX = 4
"""The call on a graph fails when so many workers have died since its begin. A guilty input ends
two: one beside others, and one alone.
"""
ENDED = ("dormant", "closed", "unloaded")
"""States of sessions that compute nothing."""


class GivenInputs(NamedTuple):
    """The named inputs of a computation; those that had stayed in the daemon; and the parts of
    buffers that it reads and writes.
    """

    tensors: Sequence[t.NamedTensor]
    kept: Sequence[KeptTensor] = ()
    use: m.BufferUse = m.NO_BUFFERS

    def check_file(self, fingerprint: str) -> None:
        """Check that the graph still has the file that has computed the kept ones.

        :raises NotFound: it was swapped.
        """
        for one in self.kept:
            one.check_file(fingerprint)


class LostAttempt(NamedTuple):
    """An attempt of a computation that the death of a worker process has ended by an *error*."""

    error: InferdError
    inputs: GivenInputs


async def read_tensor(request: Request, tensor: w.Tensor) -> t.Tensor:
    """Return a tensor with its bytes, which may be in a descriptor."""
    data = await tensor_bytes(request, tensor)
    return t.Tensor(data, tuple(tensor.dimensions), tensor_type(tensor))


async def read_passed(
    request: Request, given: Iterable[tuple[str, w.Tensor]]
) -> list[tuple[str, w.Tensor]]:
    """Return named tensors, with the bytes of those that are in descriptors."""
    read = []
    for name, tensor in given:
        if tensor.fd >= 0 and not (tensor.kept or tensor.buffer):
            data = await tensor_bytes(request, tensor)
            tensor = msgspec.structs.replace(tensor, data=data, fd=-1)
        read.append((name, tensor))
    return read


def collect_inputs(
    daemon: Daemon, request: Request, session: Session, given: Sequence[tuple[str, w.Tensor]]
) -> GivenInputs:
    """Return the inputs of a call, of which the *given* tensors are in no descriptors.

    :raises InferdError: one is not there, as in `find_kept` and `buffer_use`.
    """
    kept, tensors, in_buffers = dict[int, KeptTensor](), list[t.NamedTensor](), False
    if with_handles := [tensor for _, tensor in given if tensor.kept]:
        kept = find_kept(daemon, request, session, with_handles)
    for name, tensor in given:
        in_buffers = in_buffers or bool(tensor.buffer)
        if tensor.kept:
            tensors.append((name, kept[tensor.kept].tensor))
        else:  # one in a buffer is left there
            data = b"" if tensor.buffer else tensor.data
            read = t.Tensor(data, tuple(tensor.dimensions), tensor_type(tensor))
            tensors.append((name, read))
    use = m.NO_BUFFERS
    if in_buffers or request.params.outputs:
        use = buffer_use(daemon, request, session)
    return GivenInputs(tensors, (*kept.values(),), use)


def find_kept(
    daemon: Daemon, request: Request, session: Session, tensors: Iterable[w.Tensor]
) -> dict[int, KeptTensor]:
    """Return, by their handles, those of *tensors* that have stayed in the daemon.

    :raises NotFound: a tensor is not there.
    :raises InvalidArgument: another graph has computed one.
    :raises Busy: the user's requests in flight hold too many bytes.
    """
    handles = [tensor.kept for tensor in tensors if tensor.kept]
    found = {one: daemon.kept_tensors.get_tensor(request.connection, one) for one in handles}
    for kept in found.values():
        kept.check_model(session.model)
    if handles:  # a call of few bytes may name many, each several times
        size = sum(len(found[one].tensor.data) for one in handles)
        request.charge.grow(COPIES * size)
    return found


def buffer_use(daemon: Daemon, request: Request, session: Session) -> m.BufferUse:
    """Return the parts of buffers that a call names, for its inputs and outputs.

    :raises NotFound: the connection has no such buffer.
    :raises InvalidArgument: a part is not within its buffer, or the call is not for a graph.
    """
    p: w.ComputeParams = request.params
    given = [(name, one) for name, one in p.inputs or () if one.buffer]
    if p.inputs is None or not is_graph(session):
        raise InvalidArgument(
            "only a graph's named inputs and outputs are in buffers",
            hint="send the bytes of the tensors, or the graph's inputs by their names",
        )
    parts = [m.BufferPart(name, one.buffer, one.offset, one.length) for name, one in given]
    places = [m.BufferPart(*place) for place in p.outputs]
    found: dict[int, Buffer] = {}
    for part in (*parts, *places):
        buffer = found.get(part.buffer)
        if buffer is None:
            buffer = daemon.buffers.get_buffer(request.connection, part.buffer)
            found[part.buffer] = buffer
        buffer.check_part(part.offset, part.length)
    buffers = {handle: (one.size, one.new_descriptor) for handle, one in found.items()}
    return m.BufferUse(parts, places, buffers)


def check_keep(session: Session, p: w.ComputeParams) -> None:
    """Check that the outputs of a call may stay in the daemon, if it names any.

    :raises InvalidArgument: it has no named inputs of a graph.
    """
    if p.keep and (p.inputs is None or not is_graph(session)):
        raise InvalidArgument(
            "only a graph's outputs of named inputs stay in the daemon",
            hint="leave `keep` out, or send the graph's inputs by their names",
        )


def is_graph(session: Session) -> bool:
    """Return whether a session's model is a graph, which is known without loading it."""
    return isinstance(session.model, Lease) and session.model.is_graph


def is_configuration(name: str, tensor: t.Tensor) -> bool:
    """Return whether an input holds parameters."""
    return name in CONFIGURATION_NAMES and tensor.type == t.TENSOR_TYPES["u8"]


async def are_tensors(session: Session, inputs: Sequence[t.NamedTensor]) -> bool:
    """Return whether named inputs are for the tensor model, and not for the language model that it
    may be, too. Only a language model has parameters, and makes embeddings.
    """
    if session.active or session.state in ENDED:
        return False
    info = await info_of(session)
    is_text = session.settings.parameters.standing("embedding") or any(
        is_configuration(name, tensor) for name, tensor in inputs
    )
    return info.computes_tensors and not (info.generates and is_text)


async def is_tensor(session: Session, index: int, tensor: t.Tensor) -> bool:
    """Return whether the input of an index is for the tensor model. A model of both kinds takes
    numbers so, and any other input as text; u8 at index 1 are parameters of any model, except of a
    graph whose input 1 they fit. Beside a turn, any input is refused as a text is.
    """
    if session.active or session.state in ENDED:
        return False  # without the model, which may have been evicted
    if is_graph(session):
        if index != w.METADATA_INDEX or tensor.type != t.TENSOR_TYPES["u8"]:
            return True
        return t.fits_index((await info_of(session)).inputs, index, tensor)
    if index == w.METADATA_INDEX and not tensor.holds_numbers:
        return False
    info = await info_of(session)
    return info.computes_tensors and (tensor.holds_numbers or not info.generates)


async def info_of(session: Session) -> ModelInfo:
    """Return the facts about a session's model, without waiting if the model is loaded: a request
    must not overtake an input that its client has sent before.
    """
    return (session.model.loaded or await session.model.ready()).info


def prompt_number(inputs: Sequence[t.NamedTensor]) -> int | None:
    """Return the number of the prompt among *inputs*, if there is one.

    :raises InvalidArgument: there are several.
    """
    prompts = [n for n, named in enumerate(inputs) if not is_configuration(*named)]
    if len(prompts) > 1:
        names = [inputs[number][0] for number in prompts]
        raise InvalidArgument(
            f"{len(prompts)} tensors are prompts: {', '.join(repr(n[:50]) for n in names[:8])}",
            hint="send one prompt; parameters are JSON of type u8 in a tensor named"
            f" {' or '.join(CONFIGURATION_NAMES)}",
            data={"prompts": names},
        )
    return prompts[0] if prompts else None


def prompt_text(tensor: t.Tensor) -> bytes:
    """Return the bytes of a prompt.

    :raises InvalidArgument: it is a tensor of strings, whose data has their lengths, too.
    """
    if tensor.type == t.OTHER_TYPES[t.STRING]:
        raise InvalidArgument(
            "the prompt is a tensor of strings", hint="send the bytes of one text as u8"
        )
    return tensor.data


def text_output(data: bytes, prompt: w.Tensor) -> w.Tensor:
    """Return the output *data*, with the prompt's type and shape if it is as long."""
    if len(data) == len(prompt.data):
        return msgspec.structs.replace(prompt, data=data)
    return w.Tensor(data=data, dimensions=[len(data)], type=t.TENSOR_TYPES["u8"])


async def set_tensor(session: Session, index: int, tensor: t.Tensor) -> None:
    """Set an input of the tensor model.

    :raises InvalidArgument: the session has as many inputs as one computation may have, or the
        input does not fit the graph.
    :raises QuotaExceeded: the owner's sessions would become too large.
    """
    _check_free(session)
    if is_graph(session):
        t.check_index((await info_of(session)).inputs, index, tensor)
        _check_free(session)
    inputs = session.tensors.inputs
    if index not in inputs and len(inputs) >= w.INPUTS_MAX:
        raise InvalidArgument(
            f"{len(inputs)} inputs are set, and a computation has no more",
            hint="a text drops them; set them anew",
        )
    session.check_growth(len(tensor.data))
    session.tensors.set_input(index, tensor)
    session.count_kept_bytes()


async def compute_kept(daemon: Daemon, request: Request, session: Session) -> None:
    """Compute the outputs of the inputs that were set, for `get_output`.

    :raises Cancelled: an input, a turn or `fini_single` has dropped the outputs meanwhile.
    :raises QuotaExceeded: the owner's sessions would become too large.
    """
    before, inputs = session.tensors.outputs, session.tensors.named_inputs()
    if is_graph(session):  # the name of an input may be the index of another one
        declared = (await info_of(session)).inputs
        inputs = [(declared[int(index)].name, tensor) for index, tensor in inputs]
    outputs, _ = await _compute(daemon, request, session, GivenInputs(inputs))
    if session.tensors.outputs is not before:  # each drop makes a new list
        raise Cancelled("another call has dropped the outputs that were computed")
    size = sum(len(tensor.data) for _, tensor in outputs)
    request.charge.grow(COPIES * size)
    session.check_growth(size)
    session.tensors.outputs = [tensor for _, tensor in outputs]
    session.count_kept_bytes()


async def compute_named(
    daemon: Daemon, request: Request, session: Session, inputs: GivenInputs
) -> list[tuple[str, w.Tensor]]:
    """Return the outputs of *inputs*, as `named_outputs` does."""
    p: w.ComputeParams = request.params
    if p.keep or p.outputs:
        check_names(daemon, request, (await info_of(session)).outputs)
    outputs, fingerprint = await _compute(daemon, request, session, inputs)
    return named_outputs(daemon, request, session, inputs, outputs, fingerprint)


def named_outputs(
    daemon: Daemon,
    request: Request,
    session: Session,
    inputs: GivenInputs,
    outputs: Sequence[t.NamedTensor],
    fingerprint: str,
) -> list[tuple[str, w.Tensor]]:
    """Return the *outputs* of a model with this *fingerprint* for the client. Those that the call
    names stay in the daemon.

    :raises InferdError: they are too large, or too many stay; then none stays.
    """
    p: w.ComputeParams = request.params
    staying = _keep_outputs(daemon, request, session, outputs, fingerprint) if p.keep else {}
    try:
        sent = [one for one in outputs if one[0] not in staying] if staying else outputs
        _charge_outputs(request, sent)
    except (Busy, TooLarge):
        daemon.kept_tensors.free_tensors(request.connection, [*staying.values()])
        raise
    return _spelled_outputs(p, inputs.tensors, outputs, staying)


def _spelled_outputs(
    p: w.ComputeParams,
    inputs: Sequence[t.NamedTensor],
    outputs: Sequence[t.NamedTensor],
    staying: Mapping[str, int],
) -> list[tuple[str, w.Tensor]]:
    """Return *outputs* of *inputs* for the client, those *staying* in the daemon by their handles,
    those in buffers by their places. The type of an output is spelled as that of the input with
    its name and type.
    """
    spelled = {
        (name, tensor.type): given.type
        for (name, tensor), (_, given) in zip(inputs, p.inputs or (), strict=True)
        if not given.kept
    }
    results = [
        (
            name,
            w.Tensor(
                data=b"" if name in staying else tensor.data,
                dimensions=list(tensor.dimensions),
                type=spelled.get((name, tensor.type), t.spelled_type(tensor.type)),
                kept=staying.get(name, 0),
            ),
        )
        for name, tensor in outputs
    ]
    for place, buffer, offset, _ in p.outputs:
        for (name, result), (_, tensor) in zip(results, outputs, strict=True):
            if name == place:
                result.buffer, result.offset = buffer, offset
                result.length = t.bytes_of_shape(tensor.type, tensor.dimensions)
    return results


def check_names(daemon: Daemon, request: Request, declared: Sequence[t.TensorInfo]) -> None:
    """Check, before the computation, that the graph has *declared* the outputs that the call names.

    :raises InvalidArgument: it lacks one.
    :raises QuotaExceeded: they are too many.
    """
    p = request.params
    places = [name for name, *_ in p.outputs]
    names = {*p.keep, *places}
    if len(names) < len(p.keep) + len(places):
        raise InvalidArgument(
            "an output is named twice in `keep` and `outputs`", hint="name each output once"
        )
    unknown = next((name for name in names if all(one.name != name for one in declared)), None)
    if unknown is not None:
        raise InvalidArgument(
            f"the model has no output {unknown[: t.NAME_CHARACTERS_MAX]!r}",
            hint=f"its outputs are {t.names_text(declared)}" if declared else "it has no outputs",
        )
    daemon.kept_tensors.held.check_growth(request.owner.user, len(p.keep), 0)


def _keep_outputs(
    daemon: Daemon,
    request: Request,
    session: Session,
    outputs: Sequence[t.NamedTensor],
    fingerprint: str,
) -> dict[str, int]:
    """Let the outputs stay that the call names; return their handles by name."""
    staying = {name: tensor for name, tensor in outputs if name in request.params.keep}
    assert isinstance(session.model, Lease), "only graphs compute such calls"
    kept = daemon.kept_tensors.keep_tensors(
        request.connection, session.model, fingerprint, [*staying.values()]
    )
    return dict(zip(staying, (one.handle for one in kept), strict=True))


async def _compute(
    daemon: Daemon, request: Request, session: Session, inputs: GivenInputs
) -> tuple[list[t.NamedTensor], str]:
    """Return the outputs of *inputs* in the call's time limits, and the fingerprint of the model.
    After the death of a worker the call is not repeated, because its inputs may be the cause; see
    `_compute_on_graph` for graphs.

    :raises SessionBusy: a turn or another computation is under way.
    :raises Timeout: a time limit has passed.
    :raises NotFound: the graph was swapped, and has lost the kept inputs.
    """
    _check_free(session)
    p, timeout_s = request.params, seconds_of(request.params.timeout_s)
    requester = requester_of(daemon, session, p.priority)
    session.tensors.computation = ended = asyncio.Event()
    try:
        with anyio.fail_after(timeout_s) if timeout_s else nullcontext():
            wait_s = seconds_of(p.queue_timeout_s)
            if is_graph(session):
                computed, client = await _compute_on_graph(
                    session, requester, inputs, wait_s, request.lost_attempt
                )
            else:
                client = await session.model.ready()
                computed = await client.compute_tensors(requester, inputs.tensors, wait_s)
        count_computation(daemon, session, computed.seconds)
    except TimeoutError:
        raise total_timeout(timeout_s) from None
    finally:
        session.tensors.computation = None
        ended.set()
    return computed.outputs, client.info.fingerprint


def requester_of(daemon: Daemon, session: Session, name: str) -> Requester:
    """Return the requester of a computation in the class of this name, or the context's."""
    priority, lease = priority_of(name), session.model
    if priority is None:
        return session.requester
    if isinstance(lease, Lease):
        priority = min(priority, lease.ceilings.priority_max)
    return daemon.ledger.requester(session.owner, priority)


def count_computation(daemon: Daemon, session: Session, seconds: float) -> None:
    """Count the usage of a computation, which is written within about a second."""
    owner, key = session.owner, session.settings.key
    daemon.usage.count_computation(owner, key, session.model, seconds)


def _charge_outputs(request: Request, outputs: Sequence[t.NamedTensor]) -> None:
    """Count the memory of outputs until the reply.

    :raises TooLarge: no reply takes them.
    :raises Busy: the user's requests in flight hold too many bytes.
    """
    size = sum([len(tensor.data) for _, tensor in outputs])
    if size > REPLY_BYTES_MAX:
        raise reply_too_large(size)
    request.charge.grow(COPIES * size)


def total_timeout(seconds: float) -> Timeout:
    """Return the error of a computation that has not ended within its timeout."""
    return Timeout(f"the timeout of {seconds:g} s has passed", data={"timeout": "total"})


async def _compute_on_graph(
    session: Session,
    requester: Requester,
    inputs: GivenInputs,
    wait_s: float,
    lost: LostAttempt | None,
) -> tuple[ComputedTensors, WorkerClient]:
    """Compute with a graph, again if its worker dies, unless these inputs are known as the cause.
    If they may be, because others were under way, they are computed alone the next time. *lost* is
    the first attempt, if there was one.
    """
    alone = lost is not None and lost.error.data.get("cause") == SUSPECT
    deaths = int(lost is not None)
    while True:
        client = await session.model.ready()
        inputs.check_file(client.info.fingerprint)
        try:
            computed = await client.compute_tensors(
                requester, inputs.tensors, wait_s, alone=alone, use=inputs.use
            )
            return computed, client
        except WorkerCrashed as exc:
            deaths += 1
            cause = exc.data.get("cause")
            if cause == GUILTY or deaths >= GRAPH_DEATHS_MAX:
                raise
            alone = alone or cause == SUSPECT


def _check_free(session: Session) -> None:
    if session.state in ENDED:
        raise InvalidArgument(f"the context is {session.state.value}", hint="open another one")
    if session.active or session.tensors.computation is not None:
        raise SessionBusy("the context computes", hint="wait for the end, or use another context")
