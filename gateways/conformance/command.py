"""`inferd conformance`: the suite on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from ...backends.errors import ConnectionLost, InvalidArgument
from ...cli.client import socket_of
from ...cli.options import EXIT_REFUSED, JsonOutput, SocketPath
from ...cli.output import note, table, write, write_json
from .peer import PROTOCOL

Patterns = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CASE]...", help="Names of cases, with wildcards; else all."),
]
EchoName = Annotated[str, typer.Option("--model", metavar="NAME", help="The echo model.")]
TimeoutS = Annotated[
    float,
    typer.Option("--timeout", metavar="S", min=0.1, max=600, help="The longest wait for a frame."),
]
PatienceS = Annotated[
    float,
    typer.Option(
        "--patience",
        metavar="S",
        min=0,
        max=3600,
        help="The longest wait for an expiry; cases that take longer are skipped.",
    ),
]
Drain = Annotated[
    bool, typer.Option("--drain", help="Drain the server at the end: it then takes no more work.")
]


def conformance(
    cases: Patterns = None,
    model: EchoName = "echo",
    timeout: TimeoutS = 10.0,
    patience: PatienceS = 0.0,
    drain: Drain = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Check that a server speaks the protocol: every rule that a client can see.

    It exits with 1 if a case failed.
    """
    from .cases import __all__ as _registered
    from .suite import CASES, SuiteOptions, run_cases, selected

    assert _registered
    chosen = selected(cases or (), CASES)
    if not chosen:
        raise InvalidArgument("no case has such a name", hint="inferd conformance --json lists all")
    path = str(socket_of(socket))
    _check_reachable(path)
    options = SuiteOptions(path, model, timeout, patience, drain)
    results = run_cases(options, chosen)
    counts = {
        outcome: sum(r.outcome == outcome for r in results)
        for outcome in ("passed", "failed", "skipped")
    }
    if as_json:
        write_json({"protocol": PROTOCOL, **counts, "cases": results})
    else:
        rows = [(r.outcome, r.name, r.section.replace("`", ""), r.detail) for r in results]
        table(("OUTCOME", "CASE", "SECTION", "DETAIL"), rows)
        write(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    for result in results:
        if result.outcome == "failed":
            note(f"{result.name}: {result.rule}")
    if counts["failed"]:
        raise typer.Exit(EXIT_REFUSED)


def _check_reachable(path: str) -> None:
    """Raise `ConnectionLost` unless a server listens on the socket."""
    import socket as sockets

    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError as exc:
            raise ConnectionLost(
                f"no daemon answers at {path}: {exc.strerror}",
                hint="start it with `inferd start`, or name another --socket",
            ) from None
