"""The wasi-nn calls that compute a turn, with WasmEdge's behaviour."""

from __future__ import annotations

import msgspec

from ...backends.params import parse_json_options
from ...ipc import messages as w
from ...ipc.server.server_connection import Request
from ...scheduler.output.stopping.ending import CONTEXT_FULL
from ...sessions import Session, TurnOptions
from ..core import CallTable, Daemon
from .arguments import bounded, metadata_text, number_of, tensor_bytes, turn_options
from .contexts import set_metadata
from .turns import turn_result

METADATA_NAMES = ("1", "metadata", "options", "config")
"""Names under which `compute`'s named inputs hold metadata JSON; any other holds the prompt."""


async def compute(daemon: Daemon, request: Request) -> w.ComputeResult:
    """Compute a whole turn; with named inputs, answer with named outputs."""
    session, p = daemon.session(request), request.params
    prompt = None
    for name, tensor in p.inputs or ():
        data = await tensor_bytes(tensor)
        if name in METADATA_NAMES:
            set_metadata(session, data)
        else:
            prompt = msgspec.structs.replace(tensor, data=data)
            await session.input.set_input(data)
    await _compute(daemon, session, turn_options(p, TurnOptions(embeds=True)))
    if prompt is None:
        return w.ComputeResult()
    return w.ComputeResult(
        outputs=[("output", _like(session.outputs.read_output(0), prompt))],
        metadata=session.outputs.metadata(),
    )


def _like(data: bytes, prompt: w.Tensor) -> w.Tensor:
    """Return *data* as a tensor: of the prompt's type and shape where it is as long (an echo)."""
    kind = number_of(prompt.type, w.TENSOR_TYPES, "tensor type")
    if prompt.dimensions and len(data) == len(prompt.data) and data:
        return w.Tensor(data=data, dimensions=prompt.dimensions, type=kind)
    return w.Tensor(data=data, dimensions=[len(data)], type=w.TENSOR_TYPES["u8"])


async def _compute(daemon: Daemon, session: Session, options: TurnOptions) -> None:
    daemon.check_open()
    turn = await session.runner.start_turn(options)
    await session.runner.finish_turn(turn)
    if turn.stats is not None and turn.stats.stop_reason == CONTEXT_FULL.name:
        raise turn.ending()


async def compute_single(daemon: Daemon, request: Request) -> w.ComputeSingleResult:
    """Compute the next token."""
    session = daemon.session(request)
    if not session.active:
        daemon.check_open()
    piece = await session.runner.pull_token(turn_options(request.params, TurnOptions()))
    return w.ComputeSingleResult(piece=piece)


async def prompt_compute(daemon: Daemon, request: Request) -> w.PromptComputeResult:
    """Take a prompt and answer it; the context keeps both (the prompt interface)."""
    daemon.check_open()
    session, p = daemon.session(request), request.params
    options = turn_options(p, TurnOptions(special=False))
    with session.input.rolled_back_if_refused():
        await session.input.add_text(p.prompt.encode())
        turn = await session.runner.start_turn(options)
    await session.runner.finish_turn(turn)
    return w.PromptComputeResult(text=turn.text.decode(errors="replace"))


async def run_inference(daemon: Daemon, request: Request) -> w.TurnResult:
    """Do one turn by the chat template, its history kept (apuslabs/wasi_nn_backend)."""
    daemon.check_open()
    session, p = daemon.session(request), request.params
    data = (await tensor_bytes(p.tensor)).rstrip(b"\0")
    options = parse_json_options(metadata_text(p.config))
    call = turn_options(p, TurnOptions(options=options.values, special=False))
    with session.input.rolled_back_if_refused():
        message = {"role": "user", "content": data.decode(errors="replace")}
        await session.input.add_messages([message], options.values)
        splitter = session.outputs.new_splitter(options.values)
        turn = await session.runner.start_turn(call)
    await session.runner.finish_turn(turn)
    result = turn_result(session, splitter, bytes(turn.text))
    bounded(result.text, p.size_max)
    metadata = result.metadata
    metadata["ignored"] = sorted({*metadata["ignored"], *options.ignored})
    return result


CALLS: CallTable = {
    "compute": compute,
    "compute_single": compute_single,
    "prompt_compute": prompt_compute,
    "run_inference": run_inference,
}
