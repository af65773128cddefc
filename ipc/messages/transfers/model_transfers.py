"""Messages of the calls that copy a model's file from one daemon to another."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..base import Map
from .moving import Offset, TransferId

Sha256 = Annotated[str, msgspec.Meta(pattern="^([0-9a-fA-F]{64})?\\Z")]
"""64 hexadecimal digits, or an empty text."""


class ExportModelParams(Map):
    """`export_model`: read the file of the model *name* from *offset* on. Offset 0 begins the
    transfer, whose id the caller chooses.
    """

    name: str
    transfer: TransferId
    offset: Offset = 0


class ExportModelResult(Map):
    """The next bytes of the file, whose length is `size`; the last part also has its `sha256`."""

    data: bytes
    size: int
    sha256: str = ""


class ImportModelParams(Map):
    """`import_model`: write the next bytes of a file, whose length is `size`. The last part has the
    hash `sha256` that the file must have.
    """

    name: str
    transfer: TransferId
    data: bytes
    size: Offset
    offset: Offset = 0
    sha256: Sha256 = ""


class ImportModelResult(Map):
    """Whether the file has arrived, so that the model can be loaded."""

    arrived: bool = False


class AddModelParams(Map):
    """`add_model`: copy the file in the descriptor with the index `fd` to `NAME.gguf` in the models
    directory. It must have the hash `sha256`, if that is given. `notes` are small texts to keep
    beside it, by their names: licences, for example. Without a descriptor nothing is changed; with
    `with_hash` the result then has the hash of the file that is there.
    """

    name: str
    fd: int = -1
    sha256: Sha256 = ""
    notes: dict[str, bytes] = {}
    with_hash: bool = False
    progress: bool = False


class AddModelResult(Map):
    """The path of the file, with its size and hash; these are 0 and empty if it does not exist.
    Unless `added` is set, nothing was copied: the file was there before.
    """

    file: str
    size_bytes: int = 0
    sha256: str = ""
    added: bool = False


class EndModelTransferParams(Map):
    """`end_model_transfer`: end an export, or end an import and remove its incomplete file."""

    transfer: TransferId


class CopyModelParams(Map):
    """`copy_model` of a fleet: copy the file of the model *name* to the node *to*."""

    name: str
    to: str
    sha256: Sha256 = ""


class CopyModelResult(Map):
    """The node `source` that has the file. If `up_to_date`, the node *to* had it already."""

    source: str
    size_bytes: int
    sha256: str = ""
    up_to_date: bool = False
