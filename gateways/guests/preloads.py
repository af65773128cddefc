"""Models under the names by which a guest loads them, as `--nn-preload` gives them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...backends import FILE_FORMATS
from ...backends.errors import (
    InvalidArgument,
    InvalidEncoding,
    ModelNotFound,
    NotFound,
    UnsupportedOperation,
)
from ...ipc.model_names import is_model_file

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient, Graph

_DEVICES = ("auto", "cpu", "gpu")
_FORM = "NAME:GGML:AUTO:MODEL, where MODEL is a model of the daemon or the path of a GGUF file"


@dataclass(frozen=True)
class Preload:
    """A model and where it runs: `model` is its name in the daemon, or with `is_file` the path of
    a GGUF file.
    """

    model: str
    target: str = "auto"

    is_file: bool = False


def parse_preload(text: str) -> tuple[str, Preload]:
    """Return the name and the model of *text*, in WasmEdge's form NAME:ENCODING:TARGET:PATH.

    :raises InferdError: *text* does not have this form, or its encoding or target is not supported.
    """
    name, encoding, target, model = (*text.split(":", 3), "", "", "")[:4]
    if not (name and model):
        raise InvalidArgument(f"{text!r} is not a preload", hint=_FORM)
    if encoding.lower() not in ("autodetect", *(one.encoding for one in FILE_FORMATS)):
        raise InvalidEncoding(f"the encoding {encoding!r} of {name!r} is not supported", hint=_FORM)
    if target.lower() not in _DEVICES:
        raise UnsupportedOperation(
            f"the target {target!r} of {name!r} is not supported", hint="use AUTO, CPU or GPU"
        )
    return name, Preload(model, target.lower(), "/" in model or is_model_file(model))


def find_preload(preloads: Mapping[str, Preload], name: str, target: str) -> Preload:
    """Return the model that a guest loads by *name*. Without any *preloads*, it is the daemon's
    model of this name. It runs on the guest's *target*, unless its preload names a device; a target
    that does not exist stays, so that the daemon refuses it.

    :raises NotFound: there are preloads, and none has this name.
    """
    if not preloads:
        return Preload(name, target)
    if name not in preloads:
        raise NotFound(
            f"the guest may not load {name!r}",
            hint=f"its names are {', '.join(map(repr, preloads))}; --allow-model adds others",
        )
    found = preloads[name]
    if found.target == "auto" or target not in _DEVICES:
        return replace(found, target=target)
    return found


async def load_preload(
    client: AsyncClient,
    preload: Preload,
    config: bytes,
    timeout_s: float,
    encoding: str = "autodetect",
) -> Graph:
    """Load a model with the parameters of *config*, which is JSON text or empty. The daemon checks
    that a model that is not a file has the *encoding*.

    :raises ModelNotFound: the daemon has no such model, or the file does not exist.
    :raises InvalidEncoding: the model has another encoding.
    """
    if preload.is_file:
        _check_exists(preload.model)
        return await client.load_file(
            preload.model, config=config or None, target=preload.target, timeout=timeout_s
        )
    if (preload.target, encoding) == ("auto", "autodetect"):
        return await client.load_by_name_with_config(preload.model, config, timeout=timeout_s)
    name = f"preload:{preload.model}".encode()
    builders = [name, config] if config else [name]
    return await client.load(builders, encoding, preload.target, timeout=timeout_s)


def _check_exists(path: str) -> None:
    if not os.path.exists(path):
        raise ModelNotFound(f"{path} does not exist", hint="check --nn-preload")
