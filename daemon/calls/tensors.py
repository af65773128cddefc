"""Tensors of the wasi-nn calls: prompts and parameters of a language model, or a model's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import anyio
import msgspec

from ...backends import tensors as t
from ...backends.base import ModelInfo
from ...backends.errors import Cancelled, InvalidArgument, SessionBusy, Timeout, WorkerCrashed
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ...ipc.server.request_bytes import COPIES
from ...scheduler.messages import ComputedTensors
from ...sessions import Session
from ..core import Daemon
from ..models.registry import Lease
from ..workers.deaths import GUILTY, SUSPECT
from .arguments import seconds_of, tensor_bytes, tensor_type

CONFIGURATION_NAMES = ("1", "metadata", "options", "config")
"""Names of the inputs of type u8 that are a language model's parameters as JSON."""
GRAPH_DEATHS_MAX = 4
"""The call on a graph fails when so many workers have died since its begin. A guilty input ends
two: one beside others, and one alone.
"""
ENDED = ("dormant", "closed", "unloaded")
"""States of sessions that compute nothing."""


async def read_tensor(request: Request, tensor: w.Tensor) -> t.Tensor:
    """Return a tensor with its bytes, which may be in a descriptor."""
    data = await tensor_bytes(request, tensor)
    return t.Tensor(data, tuple(tensor.dimensions), tensor_type(tensor))


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


def with_bytes(
    given: Sequence[tuple[str, w.Tensor]], inputs: Sequence[t.NamedTensor]
) -> list[tuple[str, w.Tensor]]:
    """Return the tensors of a call as they were *given*, with the bytes of those in descriptors."""
    return [
        (name, msgspec.structs.replace(tensor, data=read.data, fd=-1))
        for (name, tensor), (_, read) in zip(given, inputs, strict=True)
    ]


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
    outputs = await _compute(daemon, request, session, inputs)
    if session.tensors.outputs is not before:  # each drop makes a new list
        raise Cancelled("another call has dropped the outputs that were computed")
    session.check_growth(sum(len(tensor.data) for _, tensor in outputs))
    session.tensors.outputs = [tensor for _, tensor in outputs]
    session.count_kept_bytes()


async def compute_named(
    daemon: Daemon, request: Request, session: Session, inputs: Sequence[t.NamedTensor]
) -> list[tuple[str, w.Tensor]]:
    """Return the outputs of *inputs*. The type of an output is spelled as that of the input with
    its name and type.
    """
    spelled = {
        (name, tensor.type): given.type
        for (name, tensor), (_, given) in zip(inputs, request.params.inputs, strict=True)
    }
    return [
        (
            name,
            w.Tensor(
                data=tensor.data,
                dimensions=list(tensor.dimensions),
                type=spelled.get((name, tensor.type), _spelled_type(tensor)),
            ),
        )
        for name, tensor in await _compute(daemon, request, session, inputs)
    ]


def _spelled_type(tensor: t.Tensor) -> int | str:
    """Return the number of a type, or the name of one that has none for clients."""
    name = t.TYPE_NAMES.get(tensor.type, "")
    return name if name in t.OTHER_TYPES else tensor.type


async def _compute(
    daemon: Daemon, request: Request, session: Session, inputs: Sequence[t.NamedTensor]
) -> list[t.NamedTensor]:
    """Return the outputs of *inputs* in the call's time limits. After the death of a worker the
    call is not repeated, because its inputs may be the cause; see `_compute_on_graph` for graphs.

    :raises SessionBusy: a turn or another computation is under way.
    :raises Timeout: a time limit has passed.
    :raises Busy: the user's requests in flight hold too many bytes.
    """
    _check_free(session)
    p, timeout_s = request.params, seconds_of(request.params.timeout_s)
    session.tensors.computation = ended = anyio.Event()
    try:
        with anyio.fail_after(timeout_s) if timeout_s else nullcontext():
            wait_s = seconds_of(p.queue_timeout_s)
            if is_graph(session):
                outputs, seconds = await _compute_on_graph(session, inputs, wait_s)
            else:
                client = await session.model.ready()
                outputs, seconds = await client.compute_tensors(session.requester, inputs, wait_s)
        owner, key = session.owner, session.settings.key
        daemon.usage.count_computation(owner, key, session.model, seconds)
    except TimeoutError:
        text = f"the timeout of {timeout_s:g} s has passed"
        raise Timeout(text, data={"timeout": "total"}) from None
    finally:
        session.tensors.computation = None
        ended.set()
    request.charge.grow(COPIES * sum(len(tensor.data) for _, tensor in outputs))
    return outputs


async def _compute_on_graph(
    session: Session, inputs: Sequence[t.NamedTensor], wait_s: float
) -> ComputedTensors:
    """Compute with a graph, again if its worker dies, unless these inputs are known as the cause.
    If they may be, because others were under way, they are computed alone the next time.
    """
    alone, deaths = False, 0
    while True:
        client = await session.model.ready()
        try:
            return await client.compute_tensors(session.requester, inputs, wait_s, alone=alone)
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
