"""Messages of the calls that copy a model's file from one daemon to another."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..base import Map
from .moving import Offset, TransferId

Sha256 = Annotated[str, msgspec.Meta(pattern="^([0-9a-fA-F]{64})?\\Z")]
"""64 hexadecimal digits, or an empty text."""


class ExportModelParams(Map):
    """`export_model`: read the file of the model *name* from *offset* on; 0 begins the transfer,
    whose id the caller chooses.
    """

    name: str
    transfer: TransferId
    offset: Offset = 0


class ExportModelResult(Map):
    """The next bytes of the file, of which there are `size`; with the last ones its `sha256`."""

    data: bytes
    size: int
    sha256: str = ""


class ImportModelParams(Map):
    """`import_model`: write the next bytes of a file, of which there are `size`. With the last
    ones, the file must have the hash `sha256`.
    """

    name: str
    transfer: TransferId
    data: bytes
    size: Offset
    offset: Offset = 0
    sha256: Sha256 = ""


class ImportModelResult(Map):
    """Whether the file has arrived: the model can be loaded."""

    arrived: bool = False


class EndModelTransferParams(Map):
    """`end_model_transfer`: read no more, or remove what was written."""

    transfer: TransferId


class CopyModelParams(Map):
    """`copy_model` of a fleet: copy the file of the model *name* to the node *to*."""

    name: str
    to: str
    sha256: Sha256 = ""


class CopyModelResult(Map):
    """The node `source` of the file; `up_to_date`: the node *to* had it already."""

    source: str
    size_bytes: int
    sha256: str = ""
    up_to_date: bool = False
