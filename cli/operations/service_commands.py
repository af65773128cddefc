"""`inferd install-service` and `uninstall-service`: each step is shown before it is done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ..options import JsonOutput
from ..output import note, write, write_json

if TYPE_CHECKING:
    from ...daemon.service.install import Service, Step

User = Annotated[bool, typer.Option("--user", help="Your own service instead of the machine's.")]
Apply = Annotated[bool, typer.Option("--apply/--dry-run", help="Run the steps, or only show them.")]
Root = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write below this folder, for another machine.", show_default=False
    ),
]


def install_service(
    user: User = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Give it access to the machine's GPUs.")
    ] = False,
    apply: Apply = False,
    root: Root = None,
    as_json: JsonOutput = False,
) -> None:
    """Install inferd as a systemd service.

    It shows each file and command; --apply runs them. A second run updates the service.
    """
    from ...daemon.service.install import Service, check_reachable, executable, install_plan

    if user and gpu:
        raise typer.BadParameter(
            "--gpu is for the machine's service; a user's service can always use GPUs"
        )
    service = Service(user=user, gpu=gpu, root=root and root.absolute())
    start = executable()
    if not user and root is None:
        check_reachable(start)
    _show_and_do(service, install_plan(service, start), apply, as_json)
    if user and apply and not as_json:
        note("the service ends when you log out; `loginctl enable-linger` keeps it running")


def uninstall_service(
    user: User = False,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also delete configuration, sessions and models.")
    ] = False,
    apply: Apply = False,
    root: Root = None,
    as_json: JsonOutput = False,
) -> None:
    """Remove the systemd service.

    It shows each file and command; --apply runs them. Data of the service stays without --purge.
    """
    from ...daemon.service.install import Service, uninstall_plan

    service = Service(user=user, root=root and root.absolute())
    _show_and_do(service, uninstall_plan(service, purge=purge), apply, as_json)


def _show_and_do(service: Service, steps: list[Step], apply: bool, as_json: bool) -> None:
    from ...daemon.service.install import run_steps

    shown = [{"action": s.action} | msgspec.to_builtins(s, enc_hook=str) for s in steps]
    if not as_json:
        for step in shown:
            if step["action"] != "absent":
                _show(step, apply)
    if apply:
        run_steps(service, steps)
    if as_json:
        write_json({"steps": shown, "applied": apply})
    elif not apply:
        note("nothing was changed: --apply runs these steps")
    elif service.root is not None:
        note(f"the files are below {service.root}; run the commands on the target machine")


def _show(step: dict[str, Any], apply: bool) -> None:
    write(f"{step['action']:<8}{step.get('path') or ' '.join(step['command'])}")
    if step["action"] in ("write", "replace") and not apply:
        for line in step["text"].splitlines():
            write(f"        {line}".rstrip())
