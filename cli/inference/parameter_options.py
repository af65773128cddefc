"""`inferd parameters`: the parameters for `--option`, JSON and the configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from ...backends.params import BY_SPELLING, PARAMETERS, Parameter, nearest
from ...backends.params.parameter_table import columns, json_schema
from .. import completion
from ..options import JsonOutput
from ..output import table, write, write_json


def parameters(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Parameters to explain, by name or alias; without any, all are listed.",
            autocompletion=completion.parameters,
        ),
    ] = None,
    as_json: JsonOutput = False,
) -> None:
    """List the model parameters, or explain some of them.

    --option, JSON and the configuration accept them; --json prints their JSON schema.
    """
    selected = [_named(name) for name in names or ()] or PARAMETERS
    if as_json:
        write_json(json_schema(selected))
    elif not names:
        rows = [(n, level, t, d) for n, level, _, t, d, *_ in map(columns, selected)]
        table(("PARAMETER", "LEVEL", "TYPE", "DEFAULT"), rows)
    else:
        for p in selected:
            name, level, also, kind, default, bounds, meaning = columns(p)
            write(f"{name}: {meaning}")
            write(f"  {kind} {bounds}".rstrip() + f"; of a {level}; default: {default}")
            if also:
                write(f"  aliases: {also}")


def _named(name: str) -> Parameter:
    found = BY_SPELLING.get(name.replace("_", "-"))
    if found is None:
        close = nearest(name.replace("_", "-"), BY_SPELLING)
        raise typer.BadParameter(
            f"there is no parameter {name!r}" + (f"; {close}" if close else "")
        )
    return found
