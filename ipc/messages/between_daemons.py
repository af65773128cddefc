"""Messages between daemons: sessions that move, their copies, files of models, users' shares."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .base import Map

PART_BYTES = 512 << 10
"""Bytes of an exported session in one reply, and in one request."""
TRANSFER_CHARACTERS_MAX = 64
TransferId = Annotated[str, msgspec.Meta(min_length=1, max_length=TRANSFER_CHARACTERS_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=0)]


class ExportParams(Map):
    """`export_session`: read a dormant session from *offset* on. Offset 0 begins the transfer,
    whose id the caller chooses. `uid` is the session's user, by default the caller's; `peer` is the
    caller's name for the other daemon.
    """

    session_id: str
    """The session."""
    transfer: TransferId
    """The transfer's id, of 1 to 64 characters; it must be a new one for each transfer."""
    uid: int | None = None
    """The session's user, who may be another one for an operator; nil: the caller's."""
    label: str = ""
    """The session's [label](#labels)."""
    peer: str = ""
    """The caller's name of the other daemon, for `sessions`."""
    offset: Offset = 0
    """The first byte of the part; 0 begins the transfer."""


class ExportResult(Map):
    """The next bytes of the exported session, whose length is `size`. `on_behalf_of` names the
    session's user for the import.
    """

    data: bytes
    """The part."""
    size: int
    """The size of all parts."""
    on_behalf_of: str = ""
    """The session's user as a [gateway](#gateways) has named it; empty: the caller's user."""


class ImportParams(Map):
    """`import_session`: write the next bytes of an exported session, whose length is `size`."""

    session_id: str
    """The session."""
    transfer: TransferId
    """The transfer's id."""
    data: bytes
    """The part."""
    size: Offset
    """The size of all parts."""
    on_behalf_of: str = ""
    """The session's user; empty: the caller's."""
    label: str = ""
    """The session's label."""
    peer: str = ""
    """The caller's name of the other daemon, for `sessions`."""
    offset: Offset = 0
    """The first byte of the part; 0 begins again."""


class ImportResult(Map):
    """The number of bytes that the daemon takes in all. The session has arrived once they are
    written.
    """

    size: int
    """The number of bytes after which the session has arrived."""


class EndTransferParams(Map):
    """`end_transfer` with an outcome: the session stays on this daemon (`keep`) or leaves it
    (`release`), or its copy or record on this daemon is deleted (`drop`).
    """

    transfer: TransferId
    """The transfer's id."""
    outcome: Literal["keep", "release", "drop"]
    """Of a held session, on the connection that exports it: `keep` or `release`; of one whose parts
    are still being imported over this connection: `drop`; of an arriving one, or of a
    [copy](#copies-of-sessions): `keep` or `drop`; of the record of a departed one: `drop`.
    """


class CopiedChange(Map):
    """A change of a session with an id, sent to a client with `copies` in its hello, before the
    reply that acknowledges it.

    The changes of a `stream` are numbered from 1. The first one has the `whole` session; later ones
    may have it too. `data` is for `store_copy`. If the session was deleted, or the change is too
    large for a frame, only the reason is sent: `state` is `deleted` or `too-large`.
    """

    session_id: str
    """The session."""
    stream: str
    """The opening of the session; its changes are numbered."""
    number: int
    """The number, from 1. The first change has the whole session."""
    data: bytes = b""
    """The change, for `store_copy` of a daemon of the same version."""
    whole: bool = False
    """Whether it has the whole session."""
    model: str = ""
    """The session's model."""
    state: str = ""
    """`deleted`: the session no longer exists; `too-large`: the change does not fit into a
    frame, and is not sent.
    """


class ReadCopyParams(Map):
    """`read_copy`: read a whole session with an id, open or dormant."""

    session_id: str
    """The session."""
    on_behalf_of: str = ""
    """The session's user; empty: the caller's."""
    label: str = ""
    """The session's label."""


class ReadCopyResult(Map):
    """The whole session as a change; see `CopiedChange`. An open session's stream continues after
    it.
    """

    stream: str
    """The stream; if the session is open and its changes are sent, they continue this stream."""
    number: int
    """The number of this change in it."""
    data: bytes
    """The whole session as a change."""
    model: str
    """The session's model."""


class StoreCopyParams(Map):
    """`store_copy`: apply a change to the copy of a session that is on the daemon `peer`. `size` is
    the length of the whole change, which may be sent in parts.
    """

    session_id: str
    """The session."""
    stream: TransferId
    """The stream of the change, of 1 to 64 characters."""
    number: Offset
    """Its number."""
    data: bytes
    """The change, or a part of it."""
    size: Offset
    """The size of all parts."""
    on_behalf_of: str = ""
    """The session's user; empty: the caller's."""
    label: str = ""
    """The session's label."""
    peer: str = ""
    """The caller's name of the daemon that has the session, for `sessions`."""
    offset: Offset = 0
    """The first byte of the part; 0 begins again."""


Sha256 = Annotated[str, msgspec.Meta(pattern="^([0-9a-fA-F]{64})?\\Z")]
"""64 hexadecimal digits, or an empty text."""


class ExportModelParams(Map):
    """`export_model`: read the file of the model *name*, or its projector, from *offset* on. Offset
    0 begins the transfer, whose id the caller chooses.
    """

    name: str
    """The model's name; a swap does not change the file."""
    transfer: TransferId
    """The transfer's id, of 1 to 64 characters; it must be a new one for each transfer."""
    offset: Offset = 0
    """The first byte of the part; 0 begins the transfer."""
    projector: bool = False
    """Read the model's projector instead, which reads images or sounds."""


class ExportModelResult(Map):
    """The next bytes of the file, whose length is `size`; the last part also has its `sha256`."""

    data: bytes
    """The part."""
    size: int
    """The size of the file; 0: the model has no projector."""
    sha256: str = ""
    """With the last part: the SHA-256 of all parts, in hexadecimal digits."""


class ImportModelParams(Map):
    """`import_model`: write the next bytes of a file, whose length is `size`. The last part has the
    hash `sha256` that the file must have. A projector comes before its model, in the same transfer.
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
    projector: bool = False
    """The file is the model's projector, and becomes `NAME-mmproj.gguf`: together with the model,
    whose parts follow, or at once if the model is there.
    """


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
    """Its SHA-256; empty if it was not copied."""
    up_to_date: bool = False
    """Whether nothing was copied, because the node had a file of this name and size."""
    projector_bytes: int = 0
    """The size of its projector, if that was copied."""


SERVED_TOKENS_MAX = 1 << 40
"""Tokens of a user that one call may report."""


class ExchangeServedParams(Map):
    """`exchange_served`: the tokens that other daemons have computed since the last call, by model
    and user. A user is named as in `on_behalf_of`; an empty name is the caller.
    """

    elsewhere: dict[str, dict[str, Annotated[int, msgspec.Meta(ge=0, le=SERVED_TOKENS_MAX)]]] = {}
    """The tokens that other daemons have computed since the last call: for each model a map of
    users to tokens, of at most `SERVED_TOKENS_MAX` each.
    """


class ExchangeServedResult(Map):
    """The tokens that this daemon has computed so far, by model and user. Only users appear who
    have tasks, or for whom tokens were computed since the last call.
    """

    served: dict[str, dict[str, Annotated[int, msgspec.Meta(ge=0)]]]
    """The tokens that this daemon has computed so far, in the same form: those of users who have
    turns, or for whom tokens were computed since the last call.
    """
