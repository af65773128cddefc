"""A demonstration: several programs share one model, and the urgent one goes first.

It starts a real daemon on its own socket and runs background writers, chats and one late urgent
question on SmolLM2. It prints the answers as they arrive and then the programs' statistics.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import inferd
from inferd import Priority
from inferd.backends import ModelSpec
from inferd.backends.tuning_choice import this_cpu
from inferd.daemon.models.tuning_records import TuningRecords
from inferd.daemon.residency.machine import cores_usable
from inferd.daemon.tuning.report import SECONDS_MAX, measure_at_once
from inferd.testing import RunningDaemon, running_daemon

MODELS = Path(__file__).resolve().parent.parent / ".cache" / "models"
MODEL = "smollm2-135m-instruct"
SLOTS, CTX_SIZE = 4, 1024
URGENT_AFTER_S = 3.0
SHOWN_CHARACTERS = 70


@dataclass
class Program:
    """One of the programs that share the daemon, and its progress."""

    name: str
    priority: Priority
    prompt: str
    tokens: int
    after_s: float = 0.0
    text: str = ""
    state: str = "not started"
    ttft_s: float = 0.0
    tokens_per_s: float = 0.0
    output_tokens: int = 0
    error: str = ""

    def run(self, socket: str) -> None:
        """Run one turn as a separate program would, with its own connection and session."""
        time.sleep(self.after_s)
        self.state = "waiting"
        try:
            with inferd.Client(socket) as client:
                options = {"n-predict": self.tokens, "seed": 1}
                with client.session(MODEL, priority=self.priority, options=options) as session:
                    self._stream_answer(session)
        except inferd.InferdError as exc:
            self.state, self.error = "failed", str(exc)

    def _stream_answer(self, session: inferd.Session) -> None:
        started = time.monotonic()
        for piece in session.stream(self.prompt):
            if not self.text:
                self.ttft_s, self.state = time.monotonic() - started, "answering"
            self.text += piece
        metadata = session.metadata
        self.output_tokens = metadata["output_tokens"]
        self.tokens_per_s = self.output_tokens / max(metadata["predicted_ms"] / 1000, 1e-3)
        self.state = f"done ({metadata['stop_reason']})"


PROGRAMS = [
    Program("writer 1", "low", "Write a long story about a lighthouse.", 160),
    Program("writer 2", "low", "Write a long story about a baker.", 160),
    Program("writer 3", "low", "Write a long story about a clock.", 160),
    Program("writer 4", "low", "Write a long story about a river.", 160),
    Program("chat 1", "normal", "What is the capital of France?", 40, 0.5),
    Program("chat 2", "normal", "Name three colours.", 40, 1.0),
    Program("alarm", "urgent", "Say in one sentence: what is smoke?", 30, URGENT_AFTER_S),
]


def table(programs: list[Program]) -> Table:
    """Return the programs as a table."""
    shown = Table(expand=True)
    for title in ("program", "class", "state", "first token", "tok/s"):
        shown.add_column(title, no_wrap=True)
    shown.add_column("text", ratio=1, no_wrap=True)
    for p in programs:
        first = f"{p.ttft_s:.2f} s" if p.text else ""
        speed = f"{p.tokens_per_s:.1f}" if p.tokens_per_s else ""
        tail = p.text.replace("\n", " ")[-SHOWN_CHARACTERS:] or p.error
        shown.add_row(p.name, p.priority, p.state, first, speed, Text(tail))
    return shown


def watch(console: Console, programs: list[Program], running: list[Future[None]]) -> None:
    """Show the programs until all are done, live on a terminal or else with a line per change."""
    if console.is_terminal:
        with Live(table(programs), console=console, refresh_per_second=8) as live:
            while not all(r.done() for r in running):
                time.sleep(0.1)
                live.update(table(programs))
        return
    states: dict[str, str] = {}
    while True:
        done = all(r.done() for r in running)
        for p in programs:
            if states.get(p.name) != p.state:
                states[p.name] = p.state
                console.print(f"{p.name:9} {p.priority:7} {p.state}", highlight=False)
        if done:
            return
        time.sleep(0.05)


def show(console: Console, programs: list[Program], seconds: float) -> None:
    """Print the statistics of each program, and the totals."""
    for p in programs:
        console.rule(f"{p.name} ({p.priority})", align="left")
        console.print(Text(p.text.strip() or p.error))
    if not console.is_terminal:
        console.print(table(programs))
    tokens = sum(p.output_tokens for p in programs)
    console.print(
        f"{len(programs)} programs, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} "
        "tokens/s over all",
        highlight=False,
    )


def run(console: Console, daemon: RunningDaemon) -> bool:
    """Run the programs and return whether all succeeded."""
    with inferd.Client(daemon.socket) as client:
        client.load_by_name(MODEL)
        console.print(f"the daemon serves {MODEL} on {daemon.socket}", highlight=False)
        started = time.monotonic()
        with ThreadPoolExecutor(len(PROGRAMS)) as pool:
            watch(console, PROGRAMS, [pool.submit(p.run, daemon.socket) for p in PROGRAMS])
        show(console, PROGRAMS, time.monotonic() - started)
    alarm, low = PROGRAMS[-1], [p for p in PROGRAMS if p.priority == "low"]
    if not all(p.state.startswith("done") for p in PROGRAMS):
        return False
    console.print(
        f"the urgent question came after {URGENT_AFTER_S:g} s, with low work in all four slots; it "
        f"got its first token in {alarm.ttft_s:.2f} s; the low work is complete: "
        f"{sum(p.output_tokens for p in low)} tokens.",
        highlight=False,
    )
    return True


def choose_attention(console: Console, daemon: RunningDaemon) -> None:
    """Measure which kind of attention is faster on this machine, for the daemon's load."""
    console.print(
        f"measuring the faster attention here, {SECONDS_MAX:g} s at most",
        highlight=False,
    )
    cores = cores_usable()
    spec = ModelSpec(
        name=MODEL,
        path=str(MODELS / f"{MODEL}.gguf"),
        slots=SLOTS,
        ctx_size=CTX_SIZE,
        threads=cores,
    )
    records = TuningRecords(daemon.directory / "state")
    record = measure_at_once(spec, this_cpu(cores), records)
    console.print(record.reason if record else "the time was too short to decide", highlight=False)


def main() -> int:
    """Run the demo and return its exit status."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    defaults = f"[defaults]\nslots = {SLOTS}\nctx-size = {CTX_SIZE}\n"
    with running_daemon(defaults, models_dir=MODELS) as daemon:
        choose_attention(console, daemon)
        process = psutil.Process(daemon.pid)
        succeeded = run(console, daemon)
        family = [process, *process.children(recursive=True)]
        status = daemon.stop()
        still_running = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        ended = not Path(daemon.socket).exists() and not still_running
    clean = succeeded and status == 0 and ended
    console.print("the daemon ended, with its socket and its worker" if clean else "not clean!")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
