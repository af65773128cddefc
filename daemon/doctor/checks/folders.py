"""The daemon's folders: the models and the state."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote

import msgspec

from ....backends.gguf import parts_of
from ....backends.gguf.facts import header_of, nextn_refusal, other_content
from ....backends.gguf.header import DamagedHeader
from ....backends.gguf.vocabulary import read_vocabulary, vocabulary_mismatch
from ....backends.model_spec import CPU
from ....ipc.model_names import find_name
from ...config.model_settings import ModelConfig
from ...config.settings import Config
from ...config.sources import ConfigError, load_config
from ...models.model_files import (
    FileNotOffered,
    FoundModels,
    files_in_use,
    files_not_offered,
    find_models,
    missing_files,
    size_bytes,
)
from ...models.projectors import ProjectorChoice, ProjectorFinder, wish_of
from ...printable import escape_controls, size_text
from ..finding import Finding, fail, ok, warn
from .accounts import READ, SEARCH, WRITE, Account, find_denial
from .engine_checks import ModelFile

DISK_BYTES_MIN = 1 << 30
"""A disk with less free space counts as full."""
LISTED_MAX = 20
PARTS_NAMED = 3
JOURNAL = "sessions.db*"


class DraftPair(msgspec.Struct, frozen=True):
    """The draft model that a model names, its size, and the reason why it cannot draft, if any."""

    named: str
    size: int = 0
    problem: str = ""


class Models(msgspec.Struct, frozen=True):
    """The models of a daemon that runs as *account*."""

    folder: Path
    account: Account
    exists: bool
    denied_at: str = ""
    """The place that denies the daemon access to the folder."""
    files: dict[str, Path] = {}
    """Files of the folder and the configuration by name; of a split model the first part."""
    sizes: dict[str, int] = {}
    missing: list[str] = []
    """See `missing_files`."""
    missing_parts: list[str] = []
    """A sentence for each split model that lacks some of its files."""
    not_offered: list[FileNotOffered] = []
    unreadable: dict[str, str] = {}
    """The place that denies the daemon access, by file."""
    projectors: dict[str, ProjectorChoice] = {}
    """By model, the choice of the projector of each model that has one, or files for it."""
    drafts: dict[str, DraftPair] = {}
    """By model, the draft model of each model that has one."""
    nextn: dict[str, str] = {}
    """The reasons for which NextN layers cannot draft, or empty, by model that requests them."""
    devices: dict[Path, tuple[str, str]] = {}
    """By file, the backend and the device of each graph that is set to a device."""
    pull: str = "inferd pull smollm2"
    """The command by which the caller gets a model into the folder."""

    @property
    def smallest(self) -> tuple[str, int] | None:
        """The smallest model and its size in bytes."""
        found = [(name, size) for name, size in self.sizes.items() if size > 0]
        return min(found, key=lambda it: it[1], default=None)


def inspect_models(config: Config, account: Account) -> Models:
    """Return the models of the folder and of the configuration.

    :raises PermissionError: the caller, who is not *account*, may not examine the folder.
    """
    folder = config.models_dir
    denied_at, exists = _denial_of_folder(account, folder)
    found = find_models(folder) if exists and not denied_at else FoundModels(exists=False)
    others = files_not_offered(folder, found, config.tables, other_content)
    not_models = {folder / other.file for other in others}
    missing = missing_files(config.tables, found.files)
    files = {name: file for name, file in found.files.items() if file not in not_models}
    files |= {n: m.file for n, m in config.models.items() if m.file and os.path.exists(m.file)}
    parts = [p for file in files.values() for p in files_in_use(file) if os.path.exists(p)]
    denials = {str(p): find_denial(account, p, READ) for p in parts if not denied_at}
    return Models(
        folder=folder,
        account=account,
        exists=exists,
        denied_at=denied_at,
        files=files,
        sizes={name: size_bytes(file) for name, file in files.items()},
        missing=missing,
        missing_parts=list(_missing_parts(files)),
        not_offered=others,
        unreadable={part: place for part, place in denials.items() if place},
        projectors=_find_projectors(config, files) if not denied_at else {},
        drafts=dict(_draft_pairs(config, files)) if not denied_at else {},
        nextn=dict(_nextn_refusals(config, files)) if not denied_at else {},
        devices=dict(_devices(config, files)),
        pull=pull_command(account.uid, os.geteuid(), folder, _own_folder()),
    )


def _find_projectors(config: Config, files: Mapping[str, Path]) -> dict[str, ProjectorChoice]:
    finder, found = ProjectorFinder(), {}
    for name, file in files.items():
        model = config.models.get(name, ModelConfig()).with_file(file)
        options = config.defaults | model.options
        choice = finder.find(wish_of(name, file, model.backend, options, config.models_dir))
        if choice.file or choice.note or choice.refusal is not None:
            found[name] = choice
    return found


def _draft_pairs(config: Config, files: Mapping[str, Path]) -> Iterator[tuple[str, DraftPair]]:
    for name, file in files.items():
        options = config.models.get(name, ModelConfig()).options
        named = str((config.defaults | options).get("draft-model", ""))
        if not named:
            continue
        draft = Path(named) if os.path.isabs(named) else files.get(find_name(named, files) or "")
        if draft is None:
            yield name, DraftPair(named, problem="there is no model of this name")
            continue
        try:
            problem = vocabulary_mismatch(read_vocabulary(file), read_vocabulary(draft))
        except OSError as exc:
            problem = f"it cannot be read: {exc.strerror or exc}"
        except DamagedHeader as exc:
            problem = str(exc)
        yield name, DraftPair(named, size_bytes(draft), problem)


def _nextn_refusals(config: Config, files: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    for name, file in files.items():
        if config.models.get(name, ModelConfig()).options.get("speculation") != "mtp":
            continue
        try:
            headers = [header_of(part) for part in files_in_use(file)]
        except OSError as exc:
            yield name, f"it cannot be read: {exc.strerror or exc}"
        except DamagedHeader as exc:
            yield name, str(exc)
        else:
            tensors = {tensor for header in headers for tensor in header.tensors}
            yield name, nextn_refusal(headers[0].values, tensors)


def _devices(config: Config, files: Mapping[str, Path]) -> Iterator[tuple[Path, tuple[str, str]]]:
    for name, file in files.items():
        model = config.models.get(name, ModelConfig()).with_file(file)
        if model.device != CPU:
            yield file, (model.backend, model.device)


def _denial_of_folder(account: Account, folder: Path) -> tuple[str, bool]:
    """Return the place that denies *account* access to *folder*, and whether the folder exists, as
    far as the caller can find that out. A denied folder is not a missing one.

    :raises PermissionError: the caller, who is not *account*, may not examine the folder.
    """
    try:
        exists = stat.S_ISDIR(os.stat(folder).st_mode)
        if exists and account.uid != os.geteuid():
            os.scandir(folder).close()
    except PermissionError:
        if account.uid != os.geteuid():
            raise
        return find_denial(account, folder, READ | SEARCH), True
    except OSError:
        return "", False
    return find_denial(account, folder, READ | SEARCH) if exists else "", exists


def _missing_parts(files: Mapping[str, Path]) -> Iterator[str]:
    for name, file in files.items():
        parts = parts_of(file)
        absent = [part.name for part in parts if not os.path.exists(part)]
        if len(parts) > 1 and absent:
            more = f" and {len(absent) - PARTS_NAMED} more" if len(absent) > PARTS_NAMED else ""
            shown = ", ".join(absent[:PARTS_NAMED])
            are = "is" if len(absent) == 1 else "are"
            yield f"{name}: {len(absent)} of its {len(parts)} parts {are} missing: {shown}{more}"


def pull_command(daemon: int, caller: int, folder: Path, own_folder: Path | None) -> str:
    """Return the command by which the user *caller*, whose own daemon has *own_folder*, gets a
    model into the *folder* of a daemon of the user *daemon*.
    """
    command = "inferd pull smollm2"
    if daemon == caller:
        return command if folder == own_folder else f"{command} --models-dir {quote(str(folder))}"
    return command if caller == 0 else f"sudo {command}"


def _own_folder() -> Path | None:
    try:
        return load_config().models_dir
    except ConfigError:
        return None


def check_models(models: Models) -> Iterator[Finding]:
    """Check that the models exist and that the daemon may read them."""
    user = models.account.name
    if models.denied_at:
        yield fail(
            f"{user} may not read {models.folder}: access is denied at {models.denied_at}",
            f"let {user} read and search it, or name another models-dir",
        )
    for part, denial in list(models.unreadable.items())[:LISTED_MAX]:
        yield fail(
            f"{user} may not read {part}: access is denied at {denial}",
            f"let {user} read or search {denial}",
        )
    for found in models.missing[:LISTED_MAX]:
        yield fail(found, "correct `file`, or put the file there")
    for lacking in models.missing_parts[:LISTED_MAX]:
        yield fail(lacking, "get these files, and put them beside the others")
    for other in [one for one in models.not_offered if not one.is_expected][:LISTED_MAX]:
        yield warn(
            f"{other.file} is not offered as a model: {other.reason}",
            "replace, rename or remove it; `inferd models --all` lists all such files",
        )
    if not models.exists:
        yield warn(f"the folder {models.folder} does not exist", f"`{models.pull}` creates it")
    elif not models.files and not models.denied_at:
        yield warn(f"no model in {models.folder}", f"`{models.pull}` gets a small one")
    for name, pair in list(models.drafts.items())[:LISTED_MAX]:
        shown = escape_controls(Path(pair.named).name)
        if pair.problem:
            yield fail(
                f"{name} cannot be loaded with the draft model {shown}: {pair.problem}",
                "name a smaller model of the same family by draft-model, or leave it out",
            )
        else:
            yield ok(f"{name}: {shown} drafts for it, and takes {size_text(pair.size)} more")
    for name, reason in list(models.nextn.items())[:LISTED_MAX]:
        if reason:
            yield fail(
                f"{name} cannot draft with NextN layers: {reason}",
                'leave out speculation = "mtp" for it, or use a file that has its NextN layers',
            )
        else:
            yield ok(f"{name} drafts with its NextN layer")
    if models.files:
        size = size_text(sum(models.sizes.values()))
        others = "".join(
            f"; {one.file} is not offered: {one.reason}"
            for one in [one for one in models.not_offered if one.is_expected][:LISTED_MAX]
        )
        yield ok(f"{len(models.files)} found, {size}, in {models.folder}{others}")


def check_files(files: Sequence[ModelFile]) -> Iterator[Finding]:
    """Check the models' headers."""
    for file in [f for f in files if f.error][:LISTED_MAX]:
        yield fail(f"{file.path}: {file.error}", file.hint)


class State(msgspec.Struct, frozen=True):
    """The state folder of a daemon that runs as *account*."""

    folder: Path
    account: Account
    denied_at: str = ""
    read_only: bool = False
    free_bytes: int = 0
    readable_by_others: list[str] = []
    """Files with texts of users that others than their owner may read."""


def inspect_state_folder(config: Config, account: Account) -> State:
    """Return the state of the folder, or of the existing folder in which it would be created."""
    place = next(p for p in (config.state_dir, *config.state_dir.parents) if _exists(p))
    files = [*config.state_dir.glob(JOURNAL)] if place == config.state_dir else []
    return State(
        folder=config.state_dir,
        account=account,
        denied_at=find_denial(account, place, WRITE | SEARCH),
        read_only=bool(os.statvfs(place).f_flag & os.ST_RDONLY),
        free_bytes=shutil.disk_usage(place).free,
        readable_by_others=[str(file) for file in files if _readable_by_others(file)],
    )


def _exists(path: Path) -> bool:
    """Return whether a file exists.

    :raises PermissionError: the caller may not find that out.
    """
    try:
        os.stat(path)
    except PermissionError:
        raise
    except OSError:
        return False
    return True


def _readable_by_others(file: Path) -> bool:
    try:
        return bool(file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except FileNotFoundError:  # the daemon has just deleted it
        return False


def check_state(state: State) -> Iterator[Finding]:
    """Check that the daemon can write its state, and that the state is private."""
    user = state.account.name
    if state.denied_at or state.read_only:
        denied = f"access is denied at {state.denied_at}"
        why = denied if state.denied_at else "its file system is read-only"
        yield fail(
            f"{user} may not write to {state.folder}: {why}; sessions end with the daemon",
            f"let {user} write there, or name another state-dir",
        )
    for file in state.readable_by_others:
        yield fail(f"others may read {file}: it holds texts of users", f"chmod 600 {file}")
    if state.free_bytes < DISK_BYTES_MIN:
        yield warn(
            f"{size_text(state.free_bytes)} are free on the disk of {state.folder}",
            "free some space: a full disk cannot hold sessions and KV states",
        )
    elif not state.denied_at:
        yield ok(f"{state.folder}, {size_text(state.free_bytes)} free")
