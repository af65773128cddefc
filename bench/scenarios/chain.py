"""Scenario of programs that run a chain of three models, with memory for one."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict

from bench import daemon
from bench import streams as s
from bench.chain_texts import ChainTexts, nearest
from bench.clients import Request, gather_all
from bench.daemon import StreamClient
from bench.machine import MODEL
from bench.runs import Figure, Target
from bench.streams import Stream
from tools.build_engine import ROOT
from tools.get_models import MODELS_DIR, SOURCES

from .base import INFERD, Scenario, Side, Started, Work
from .pipeline import COUNTED_TWICE_MAX, loads

IN_TURN = "each in turn"
GEMMA = MODELS_DIR / SOURCES["gemma3"].file
FILES = {"search": GEMMA, "answer": MODEL, "summarise": GEMMA}
CTX_SIZES = {"search": 512, "answer": 2048, "summarise": 2048}
PROGRAMS = SLOTS = 3
CHAINS = 3
START_GAP_S = 2.0
PASSAGES, WORDS, TOKENS = 4, 60, 12
THREADS = 1
"""For a machine with two cores, where a run of two threads stalls if another program computes."""
MEMORY_BYTES = 800_000_000
"""The models take 651 (search), 349 and 546 MB of it, with their slots and embeddings."""


def texts_of(work: Work) -> list[ChainTexts]:
    """Return the texts of all programs."""
    rng = work.rng()
    sizes = {"chains": 1 if work.small else CHAINS, "passages": PASSAGES, "words": WORDS}
    return [ChainTexts.generate(work.mark, number, rng, **sizes) for number in range(PROGRAMS)]


async def run_program(server: daemon.Inferd, work: Work, texts: ChainTexts) -> list[Stream]:
    """Run one program's chains, each of its conversations in a session with an id."""
    await asyncio.sleep(texts.number * START_GAP_S)
    vectors: list[Sequence[float]] = []
    found: list[Stream] = []
    async with AsyncExitStack() as stack:
        clients: dict[str, StreamClient] = {}
        for model in FILES:
            session_id = f"{work.serial} {texts.label(model)}"
            client = server.client(session_id=session_id, model=model)
            clients[model] = await stack.enter_async_context(client)

        async def ask(model: str, text: str) -> str:
            request = Request(text, TOKENS, texts.label(model))
            found.append(await clients[model].send_request(request))
            return clients[model].last_answer

        for chain, question in enumerate(texts.questions):
            requested_s = time.perf_counter()
            search = clients["search"].client
            new = [question] if vectors else [*texts.passages, question]
            *passages, vector = await search.embed("search", new)
            vectors += passages
            label = texts.label("search")
            found.append(Stream(requested_s, (time.perf_counter(),), 0, 0, label))
            passage = texts.passages[nearest(vector, vectors)]
            answer = await ask("answer", texts.question(chain, passage))
            await ask("summarise", texts.summary(chain, answer))
    return found


def inferd_side(server: daemon.Inferd) -> Side:
    """Return the side that runs all programs at the same time on *server*."""

    async def side(work: Work) -> list[Stream]:
        found = await gather_all(run_program(server, work, texts) for texts in texts_of(work))
        return [stream for streams in found for stream in streams]

    return side


async def start_program() -> asyncio.subprocess.Process:
    """Start a program that loads its models itself; return once it has imported llama.cpp."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.in_turn"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and await process.stdout.readline() == b"ready\n"
    return process


async def in_turn(work: Work) -> list[Stream]:
    """Run the programs one after another; all have started before the first one begins."""
    processes = [await start_program() for _ in range(PROGRAMS)]
    found: list[Stream] = []
    files = {model: str(file) for model, file in FILES.items()}
    common = {"files": files, "sizes": CTX_SIZES, "threads": THREADS, "n_predict": TOKENS}
    try:
        for process, texts in zip(processes, texts_of(work), strict=True):
            job = json.dumps(common | {"texts": asdict(texts)})
            out, _ = await process.communicate(job.encode() + b"\n")
            if process.returncode != 0:
                raise SystemExit(f"a program ended with status {process.returncode}")
            found += map(s.from_dict, json.loads(out))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return found


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the loads, the times, and the tokens computed again."""
    s.check_complete(streams)
    conversations = s.by_label(streams)
    begin_s = min(stream.requested_s for stream in streams)
    ended_s = (turns[-1].ended_s for label, turns in conversations.items() if "summarise" in label)
    return {
        "loads": loads(streams),
        "makespan_s": s.makespan_s(streams),
        "first_s": min(ended_s) - begin_s,
        "computed_twice": sum(s.computed_twice(turns) for turns in conversations.values()),
    }


def configuration() -> str:
    """Return a daemon's configuration: three models, and memory for one."""
    text = daemon.configuration(
        SLOTS, max(CTX_SIZES.values()), {"memory-bytes": MEMORY_BYTES, "cores": THREADS}
    )
    for name, file in FILES.items():
        text += f'\n[models.{name}]\nfile = "{file}"\nctx-size = {CTX_SIZES[name]}\n'
    return text


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon; the other side's programs load the models themselves."""
    server = await stack.enter_async_context(daemon.running(configuration()))
    return Started({INFERD: inferd_side(server), IN_TURN: in_turn}, {})


SCENARIO = Scenario(
    name="chain",
    title="A chain of three models, with memory for one",
    about=f"""\
{PROGRAMS} programs run {CHAINS} chains each, one after another. In a chain an embedding model finds
the passage of {PASSAGES} that is nearest to a question, SmolLM2 135M answers from it, and Gemma 3
270M summarises the answers. Gemma also makes the embeddings, as a third model. A passage has
{WORDS} words; the first chain of a program embeds them all. Answers and summaries have {TOKENS}
tokens, and each model continues its conversation in the next chain.

- **{INFERD}**: the programs begin {START_GAP_S:g} s apart and run side by side. `memory-bytes`
  fits one model, and the conversations are sessions with an id.
- **{IN_TURN}**: the programs run one after another without a daemon, since memory fits one model.
  Each loads a model with llama-cpp-python, computes one step, and frees it. All have imported
  llama-cpp-python before the first one begins, and the files are in the page cache.

All sides compute on {THREADS} thread. A load is counted wherever the first output comes from
another model than the previous one.""",
    figures=(
        Figure("loads", "loads", 0),
        Figure("makespan_s", "all done, s"),
        Figure("first_s", "first program done, s"),
        Figure("computed_twice", "history tokens computed again", 0, over="max"),
    ),
    targets=(
        Target("loads", INFERD, IN_TURN, most=0.5),
        Target("makespan_s", INFERD, IN_TURN),
        Target("computed_twice", INFERD, most=COUNTED_TWICE_MAX * PROGRAMS * 2 * (CHAINS - 1)),
    ),
    start=start,
    measure=measure,
    pictures=(INFERD,),
)
