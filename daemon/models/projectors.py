"""The choice of a model's projector, the file with which the model reads images and sounds.

The configuration names it, or the call that loads the model. Otherwise it is the file beside the
model's whose name contains `mmproj`, if exactly one fits. A thread reads the folder and the
headers, because a file server may not answer.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import anyio

from ...backends import ModelSpec
from ...backends.errors import InferdError, LoadFailed
from ...backends.gguf import parts_of
from ...backends.gguf.header import DamagedHeader
from ...backends.gguf.projector import (
    ProjectorHeader,
    TextSide,
    projector_mismatch,
    read_projector,
    read_text_side,
)
from ...backends.media_process import ProjectorFacts
from ...backends.params import MMPROJ_AUTO, MMPROJ_NONE
from ...ipc.model_names import is_gguf_file
from ...ipc.server.descriptors import BlockingThread
from ..media.settings import has_encoder
from ..printable import escape_controls
from .model_files import ENTRIES_MAX, Signature, is_named_projector, signature_of

PROJECTOR_S_MAX = 5.0
"""The longest wait for the folder and the headers at a load."""
LISTED_S_MAX = 2.0
"""The longest wait for all models of a list. If they are read later, later lists have them."""
CANDIDATES_MAX = 32
"""Projectors beside one model whose headers are read."""
CHOICES_MAX = 1000
"""Models whose choices are kept."""
UNCLEAR = -1
"""The rank of a projector whose name belongs to no model of its folder more than to others."""
HOW_TO_CHOOSE = "name one by `mmproj` in the model's table of the configuration"
HOW_TO_GET = (
    "put its projector, such as mmproj-F16.gguf, beside the model's file, or name it by `mmproj` in"
    " the model's table of the configuration, and load the model again"
)
HOW_TO_PASS = (
    "put both files into the models directory, and load the model by its name, which"
    " `inferd models` prints"
)
_NOT_WORDS = re.compile(
    r"(?<![a-z0-9])(?:mmproj(?:b?f16|f32)?|model|ud|i?q\d(?:_[0-9a-z]+)*|tq\d_\d|mxfp4(?:_moe)?"
    r"|nvfp4|bf16|f16|f32|fp16|fp32|\d{5}-of-\d{5})(?![a-z0-9])"
)
"""The parts of a file's name that do not tell models apart: types of weights, numbers of parts."""


class Wish(NamedTuple):
    """The names and values that decide on a model's projector, beside the files themselves."""

    model: str
    file: Path | None
    """The model's file; None if it has none."""
    value: str
    """The parameter `mmproj` in force: auto, none, or an absolute path."""
    requested: str
    """The file that the call which loads the model names, or an empty text."""
    models_dir: Path


@dataclass(frozen=True, slots=True)
class ProjectorChoice:
    """The projector of a model, or the reason why it has none."""

    file: str = ""
    """Its path; empty: none."""
    header: ProjectorHeader | None = None
    note: str = ""
    """The files that were left out, with the reasons."""
    refusal: InferdError | None = None
    """The error of each load: the configured file cannot be used."""
    watched: tuple[Path, ...] = ()
    """The choice holds while these files and folders are unchanged."""
    signature: Signature = ()


NO_PROJECTOR = ProjectorChoice()


def wish_of(
    name: str,
    file: Path | None,
    backend: str,
    options: Mapping[str, object],
    models_dir: Path,
    requested: Mapping[str, object] | None = None,
) -> Wish:
    """Return the wish of a model with *options* in its configuration, and *requested* ones of the
    call that loads it.
    """
    value, named = str(options.get("mmproj", MMPROJ_AUTO)), ""
    if "mmproj" not in options and requested:
        named = str(requested.get("mmproj", ""))
    if named in (MMPROJ_AUTO, MMPROJ_NONE):
        value, named = named, ""
    return Wish(name, file if backend == "llama" else None, value, named, models_dir)


# The choice, in a thread.


class ProjectorFinder:
    """Finds the projectors of several models; each folder is listed once. Blocks."""

    def __init__(self) -> None:
        self._listed: dict[Path, tuple[list[str], Signature]] = {}

    def find(self, wish: Wish) -> ProjectorChoice:
        """Return the choice for a model."""
        if wish.file is None or wish.value == MMPROJ_NONE:
            return NO_PROJECTOR
        model = parts_of(wish.file)[0]
        if wish.value != MMPROJ_AUTO:
            file = Path(wish.value)
            return _signed((model, file), partial(_configured, wish.model, model, file))
        if not wish.requested:
            return self._beside(model)
        named = named_below(wish.requested, wish.models_dir)
        watched = (model, model.parent) if named is None else (model, model.parent, named)
        return _signed(watched, partial(self._requested, wish, model))

    def _requested(self, wish: Wish, model: Path) -> ProjectorChoice:
        """Return the choice of a file that a client names, or else the projector beside the model:
        the error of one client's file is not that of others who wait for the load.
        """
        file = requested_file(wish.requested, model.parent, wish.models_dir)
        choice = NO_PROJECTOR if file is None else _configured(wish.model, model, file)
        if choice.file:
            return choice
        found = self._beside(model)
        notes = ("" if choice.refusal is None else choice.refusal.message, found.note)
        return replace(found, note="; ".join(filter(None, notes)))

    def _beside(self, model: Path) -> ProjectorChoice:
        """Return the projector beside a model's file, if exactly one fits."""
        folder = model.parent
        names, signature = self._list(folder)
        ranks = rank_projectors(model.name, names)
        files = {folder / name: ranks[name] for name in islice(ranks, CANDIDATES_MAX)}
        choice = _signed((model, *files), partial(_choose, model, files))
        return replace(
            choice, watched=(*choice.watched, folder), signature=choice.signature + signature
        )

    def _list(self, folder: Path) -> tuple[list[str], Signature]:
        """Return the files that are named as models or projectors; none of an unreadable folder."""
        if folder not in self._listed:
            signature = signature_of([folder])
            try:
                with os.scandir(folder) as entries:
                    found = [entry.name for entry in islice(entries, ENTRIES_MAX)]
            except OSError:
                found = []
            self._listed[folder] = [name for name in found if is_gguf_file(name)], signature
        return self._listed[folder]


def _signed(watched: tuple[Path, ...], choose: Callable[[], ProjectorChoice]) -> ProjectorChoice:
    """Return a choice, which holds while all that was *watched* is as it was before."""
    signature = signature_of(watched)
    choice = choose()
    return replace(choice, watched=watched + choice.watched, signature=signature + choice.signature)


def rank_projectors(model: str, names: Iterable[str]) -> dict[str, int]:
    """Return those of the files *names* in one folder that may be the projector of the file
    *model*, each with the number of words that both names share. A projector whose name fits
    another model better belongs to that one. One whose name has no word may belong to each of
    several models, and is `UNCLEAR`.
    """
    own, files = words_of(model), sorted(names)
    others = {words_of(name) for name in files if not is_named_projector(name)} - {own}
    ranks = {}
    for name in filter(is_named_projector, files):
        words = words_of(name)
        shared = len(words & own)
        if not others or (shared and shared >= max(len(words & other) for other in others)):
            ranks[name] = shared
        elif not words:
            ranks[name] = UNCLEAR
    return ranks


def words_of(name: str) -> frozenset[str]:
    """Return the words in a file's name that tell models apart."""
    stem = _NOT_WORDS.sub(" ", name.lower().removesuffix(".gguf"))
    return frozenset(re.findall(r"[^\W_]+", stem))


def _choose(model: Path, ranks: Mapping[Path, int]) -> ProjectorChoice:
    """Return the projector of the highest rank that fits; none if several have it."""
    if not ranks:
        return NO_PROJECTOR
    try:
        text = read_text_side(model)
    except (OSError, DamagedHeader):
        return NO_PROJECTOR  # the load reports it
    fitting: dict[Path, ProjectorHeader] = {}
    notes = []
    for file in ranks:
        header, problem = _compared(file, text)
        if header is not None and not problem:
            fitting[file] = header
        else:
            notes.append(f"{_name(file)} is left out: {problem}")
    rank = max((ranks[file] for file in fitting), default=UNCLEAR)
    best = [file for file in fitting if ranks[file] == rank]
    if rank != UNCLEAR and len(best) == 1:
        return ProjectorChoice(str(best[0]), fitting[best[0]])
    if rank == UNCLEAR and best:
        named = ", ".join(map(_name, best))
        notes.append(f"{named} may belong to another model in this folder: {HOW_TO_CHOOSE}")
    elif best:
        notes.append(f"several projectors fit, {', '.join(map(_name, best))}: {HOW_TO_CHOOSE}")
    return ProjectorChoice(note="; ".join(notes))


def _name(file: Path) -> str:
    return escape_controls(file.name)


def _compared(file: Path, text: TextSide) -> tuple[ProjectorHeader | None, str]:
    """Return a projector's header, if it can be read, and the reason why it does not fit, or an
    empty text.
    """
    try:
        header = read_projector(file)
    except OSError as exc:
        return None, f"it cannot be read: {exc.strerror or exc}"
    except DamagedHeader as exc:
        return None, str(exc)
    return header, projector_mismatch(header, text)


def _configured(name: str, model: Path, file: Path) -> ProjectorChoice:
    """Return the choice of a file that the configuration names."""
    try:
        text = read_text_side(model)
    except (OSError, DamagedHeader):
        return NO_PROJECTOR  # the load reports it
    header, problem = _compared(file, text)
    if header is not None and not problem:
        return ProjectorChoice(str(file), header)
    refusal = LoadFailed(
        f"{_name(file)} is not a projector for {name!r}: {problem}",
        hint=f"correct `mmproj` of {name!r} in the configuration, or set it to none",
        data={"projector": str(file)},
    )
    return ProjectorChoice(refusal=refusal)


def requested_file(text: str, folder: Path, models_dir: Path) -> Path | None:
    """Return the projector that a client means: a file of the models directory, or the file of the
    same name beside the model, in *folder*, because the client may have folders of its own. Links
    must not lead out of the models directory. Return None if there is no such file.
    """
    beside = folder / Path(text).name
    for place in (text, str(beside)):
        path = named_below(place, models_dir)
        if path is not None and _is_file_below(path, models_dir):
            return path
    return beside if is_named_projector(beside.name) and os.path.isfile(beside) else None


def _is_file_below(path: Path, models_dir: Path) -> bool:
    try:
        inside = path.resolve(strict=True).is_relative_to(models_dir.resolve())
        return inside and path.is_file()
    except (OSError, RuntimeError, ValueError):  # missing, a loop of links, or not a path
        return False


def named_below(text: str, models_dir: Path) -> Path | None:
    """Return the path of a client's text if it names a place in the models directory. No other path
    is looked at: even a `stat` can mount a file system, or wait for one for ever.
    """
    path = Path(os.path.normpath(models_dir / text))
    roots = (Path(os.path.normpath(models_dir)), models_dir.resolve())
    return path if any(path.is_relative_to(root) for root in roots) else None


# The choices of all models.


class Projectors:
    """The choices of projectors. Owned by the daemon's event loop."""

    def __init__(self, thread: BlockingThread | None = None) -> None:
        self._thread = thread or BlockingThread("model-projectors")
        self._known: dict[Wish, ProjectorChoice] = {}
        self._reading: dict[Wish, Future[ProjectorChoice]] = {}

    def known(self, wish: Wish) -> ProjectorChoice | None:
        """Return the choice, unless it was not made yet or files have changed since."""
        if wish.file is None or wish.value == MMPROJ_NONE:
            return NO_PROJECTOR
        choice = self._known.get(wish)
        if choice is None or signature_of(choice.watched) != choice.signature:
            return None
        return choice

    async def choose(self, wish: Wish) -> ProjectorChoice:
        """Return the choice, by the files as they are now."""
        choice = self.known(wish)
        if choice is not None:
            return choice
        (reading,) = self._begin([wish])
        try:
            with anyio.fail_after(PROJECTOR_S_MAX):
                return await asyncio.shield(asyncio.wrap_future(reading))
        except TimeoutError:
            return self._late(wish)

    async def read(self, wishes: Collection[Wish]) -> None:
        """Make the choices that are not known, within a bounded time."""
        unknown = [wish for wish in wishes if self.known(wish) is None]
        with anyio.move_on_after(LISTED_S_MAX):
            for reading in self._begin(unknown):
                await asyncio.shield(asyncio.wrap_future(reading))

    def _begin(self, wishes: Collection[Wish]) -> list[Future[ProjectorChoice]]:
        """Return the results for *wishes*, of which new ones are read now."""
        new: dict[Wish, Future[ProjectorChoice]] = {}
        for wish in wishes:
            if wish not in self._reading:
                self._reading[wish] = new[wish] = Future()
        found = [self._reading[wish] for wish in wishes]
        if new:
            loop = asyncio.get_running_loop()
            for wish, reading in new.items():
                asyncio.wrap_future(reading, loop=loop).add_done_callback(partial(self._note, wish))
            self._thread.submit(partial(_find_all, new))
        return found

    def _note(self, wish: Wish, result: asyncio.Future[ProjectorChoice]) -> None:
        self._reading.pop(wish, None)
        self._known.pop(wish, None)
        while len(self._known) >= CHOICES_MAX:
            del self._known[next(iter(self._known))]
        if not result.cancelled() and result.exception() is None:
            self._known[wish] = result.result()

    def _late(self, wish: Wish) -> ProjectorChoice:
        """Return the choice while the files do not answer."""
        reason = f"no answer within {PROJECTOR_S_MAX:g} s"
        if wish.value == MMPROJ_AUTO:
            return ProjectorChoice(note=f"its folder cannot be read: {reason}")
        message = f"the projector of {wish.model!r} cannot be read: {reason}"
        return ProjectorChoice(refusal=LoadFailed(message, data={"projector": wish.value}))


def _find_all(wishes: Mapping[Wish, Future[ProjectorChoice]]) -> None:
    finder = ProjectorFinder()
    for wish, found in wishes.items():
        try:
            found.set_result(finder.find(wish))
        except Exception as exc:  # it belongs to the callers that wait
            found.set_exception(exc)


# The memory of projectors.


class MeasuredProjectors:
    """The facts that encoder processes have measured, by the projector's file, valid while it is
    unchanged. Owned by the daemon's event loop.
    """

    def __init__(self) -> None:
        self._by_file: dict[str, tuple[Signature, ProjectorFacts]] = {}

    def facts_of(self, file: str) -> ProjectorFacts | None:
        """Return the facts about a file, if they were measured."""
        signature, facts = self._by_file.get(file, ((), None))
        if facts is None:
            return None
        return facts if signature == signature_of([Path(file)]) else None

    def note_facts(self, file: str, signature: Signature, facts: ProjectorFacts) -> None:
        """Store the facts about a file that had *signature* before it was opened."""
        self._by_file.pop(file, None)
        while len(self._by_file) >= CHOICES_MAX:
            del self._by_file[next(iter(self._by_file))]
        self._by_file[file] = signature, facts


def encoder_bytes(
    spec: ModelSpec, choice: ProjectorChoice, facts: ProjectorFacts | None, cache_bytes: int
) -> int:
    """Return the memory of the encoder process of *spec* beside what each process of the model has;
    0 if there is none: the projector, the buffer in which it computes, and the embeddings that are
    kept. Before it was measured, the buffer counts as half of the weights.
    """
    if not has_encoder(spec):
        return 0
    if facts is not None:
        return facts.weights_bytes + facts.buffer_bytes + cache_bytes
    weights = 0 if choice.header is None else choice.header.weights_bytes
    return weights * 3 // 2 + cache_bytes
