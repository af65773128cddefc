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
    """The model's name; a swap does not change the file."""
    transfer: TransferId
    """The transfer's id, of 1 to 64 characters; it must be a new one for each transfer."""
    offset: Offset = 0
    """The first byte of the part; 0 begins the transfer."""


class ExportModelResult(Map):
    """The next bytes of the file, whose length is `size`; the last part also has its `sha256`."""

    data: bytes
    """The part."""
    size: int
    """The size of the file."""
    sha256: str = ""
    """With the last part: the SHA-256 of all parts, in hexadecimal digits."""


class ImportModelParams(Map):
    """`import_model`: write the next bytes of a file, whose length is `size`. The last part has the
    hash `sha256` that the file must have.
    """

    name: str
    """The name that the model gets."""
    transfer: TransferId
    """The transfer's id."""
    data: bytes
    """The part."""
    size: Offset
    """The size of the file."""
    offset: Offset = 0
    """The first byte of the part; 0 begins the transfer."""
    sha256: Sha256 = ""
    """The SHA-256 that the file must have; required with the last part."""


class ImportModelResult(Map):
    """Whether the file has arrived, so that the model can be loaded."""

    arrived: bool = False
    """Whether this was the last part: the model can be loaded."""


class AddModelParams(Map):
    """`add_model`: copy the file in the descriptor with the index `fd` to `NAME.gguf` in the models
    directory. It must have the hash `sha256`, if that is given. `notes` are small texts to keep
    beside it, by their names: licences, for example. Without a descriptor nothing is changed; with
    `with_hash` the result then has the hash of the file that is there.
    """

    name: str
    """The name that the model gets."""
    fd: int = -1
    """The index of the file's descriptor; -1: none."""
    sha256: Sha256 = ""
    """The SHA-256 that the file must have, or empty."""
    notes: dict[str, bytes] = {}
    """At most 8 texts by name, to keep beside the file: licences, notices, terms."""
    with_hash: bool = False
    """Without a descriptor: also return the hash of the file that is there."""
    progress: bool = False
    """Send progress events."""


class AddModelResult(Map):
    """The path of the file, with its size and hash; these are 0 and empty if it does not exist.
    Unless `added` is set, nothing was copied: the file was there before.
    """

    file: str
    """The path of the file."""
    size_bytes: int = 0
    """Its size; 0 if it does not exist."""
    sha256: str = ""
    """Its SHA-256, if it was copied, compared or requested."""
    added: bool = False
    """Whether it was copied; false if it was there, with the same contents."""


class EndModelTransferParams(Map):
    """`end_model_transfer`: end an export, or end an import and remove its incomplete file."""

    transfer: TransferId
    """The transfer's id."""


class CopyModelParams(Map):
    """`copy_model` of a fleet: copy the file of the model *name* to the node *to*."""

    name: str
    """The model's name."""
    to: str
    """The node that gets the file."""
    sha256: Sha256 = ""
    """The SHA-256 that the file must have; empty: that of the node that has it."""


class CopyModelResult(Map):
    """The node `source` that has the file. If `up_to_date`, the node *to* had it already."""

    source: str
    """The node that had the file."""
    size_bytes: int
    """Its size."""
    sha256: str = ""
    """Its SHA-256; empty if nothing was copied."""
    up_to_date: bool = False
    """Whether nothing was copied, because the node had a file of this name and size."""
