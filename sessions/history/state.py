"""The history of a session, active or dormant, its resumable turn, and its vocabulary."""

from __future__ import annotations

from ...backends import ModelInfo
from ...backends.errors import InvalidArgument, UnsupportedOperation, WorkerCrashed
from ...backends.media import items_of
from ...scheduler.messages import unpack_tokens
from ...scheduler.owner import Requester
from ..entries import Replay, StoredSession, TurnPiece, decode_history, encode, resumable_of
from ..worker_client import ModelSource, TextClient, retry_query
from .history import History, TurnOutput, packed_history
from .media import note_on


class HistoryState:
    """The history of a session, which owns this. `now` is the history up to the turn under way. If
    it ends with a `resumable` turn, whose reader may not have all of it, that turn began on the
    history `before`. A dormant session has only the packed form.
    """

    def __init__(self, history: History | None = None) -> None:
        self.resumable: Replay | None = None
        self.now = self.before = history or History()
        self._packed: bytes | None = None
        self._tokens = 0
        self._interrupted = False
        self._contents = frozenset[bytes]()
        """The contents of the images and sounds of a packed history."""

    @classmethod
    def from_stored(cls, stored: StoredSession) -> HistoryState:
        new = cls()
        new._packed = packed_history(stored)
        output = sum(len(unpack_tokens(piece.tokens)) for piece in stored.pieces)
        dropped = sum(discard for piece in stored.pieces for *_, discard in piece.shifts)
        new._tokens = stored.facts.tokens + output - dropped
        last = stored.pieces[-1] if stored.pieces else resumable_of(stored.past)
        new._interrupted = last is not None and last.end is None
        new._contents = frozenset(stored.facts.media)
        return new

    def replace_history(self, history: History) -> None:
        """Replace the history by one without a resumable turn."""
        self.now = self.before = history
        self.resumable = None

    @property
    def interrupted(self) -> bool:
        """Whether the last turn was interrupted, also of a dormant session."""
        if self._packed is not None:
            return self._interrupted
        return self.resumable is not None and not self.resumable.ended

    @property
    def dormant_tokens(self) -> int | None:
        """The length of a dormant history, or None if the session is active."""
        return None if self._packed is None else self._tokens

    @property
    def packed(self) -> bytes:
        if self._packed is None and self.resumable is not None:
            return encode(self.before.entry(self.resumable.whole))
        return self._packed or encode(self.now.entry())

    @property
    def contents(self) -> frozenset[bytes]:
        """The hashes of the contents of its images and sounds, also of a dormant session."""
        if self._packed is not None:
            return self._contents
        found = self.now.contents
        return found if self.before is self.now else found | self.before.contents

    @property
    def kept_bytes(self) -> int:
        total = len(self._packed or b"") + self.now.kept_bytes
        if self.before is not self.now:
            total += self.before.kept_bytes
        return total if self.resumable is None else total + self.resumable.kept_bytes

    def pack(self, turn: TurnOutput | None, resumable: TurnPiece | None) -> None:
        """Pack the history with *turn*; *resumable* is its whole output, if it can be resumed."""
        self._contents = self.contents
        if resumable is not None:
            self._interrupted = resumable.end is None
            self._packed = encode(self.now.entry(resumable))
        elif turn is None:
            self._interrupted = self.interrupted
            self._packed = self.packed  # an earlier turn stays resumable
        else:
            self._interrupted = False
            self._packed = encode(self.now.after(turn).entry())

    def make_dormant(self) -> None:
        """Keep only the packed history."""
        self._tokens = len(self.now.prompt)
        self.now = self.before = History()
        self.resumable = None  # the packed history has it

    def unpacked_history(self) -> History:
        """Return the history of a dormant session, which stays packed."""
        state = HistoryState()
        state._packed = self.packed
        state.activate()
        return state.now

    def activate(self) -> None:
        entry = decode_history(self.packed)
        self.now, self._packed = History.from_entry(entry), None
        if entry.resumable is not None:
            self.before = self.now
            self.resumable = Replay(self.before.prompt, (entry.resumable,))
            self.now = self.before.after(self.resumable)
        else:
            self.now = self.now.copy()  # without the notes on its last turn


class HistoryVocabulary:
    """The vocabulary of a history's tokens. Owned by its session. `hash` and `fingerprint` are
    those of the last model that the session used. `saved_text` is the history's text, saved when
    the model of its token ids was swapped.
    """

    def __init__(self, fingerprint: str = "", vocab_hash: str = ""):
        self.fingerprint, self.hash = fingerprint, vocab_hash
        self.saved_text: bytes | None = None

    @property
    def kept_bytes(self) -> int:
        return len(self.saved_text or b"")

    def branch(self) -> HistoryVocabulary:
        new = HistoryVocabulary(vocab_hash=self.hash)
        new.saved_text = self.saved_text
        return new

    def differs_from(self, info: ModelInfo) -> bool:
        """Return whether a model has another vocabulary."""
        return self.hash not in ("", info.vocab_hash)

    def check_model(self, model: ModelSource, whose: str, instead: str) -> None:
        """Check that a history of tokens alone can be used with *model*, if that is loaded.

        :raises InvalidArgument: it has another vocabulary, and the history's text is not known.
        """
        client = model.loaded
        if client is None or self.saved_text is not None or not self.differs_from(client.info):
            return
        raise InvalidArgument(
            f"{whose} has another vocabulary than model {model.name!r} now",
            hint=f"the model's file was exchanged: {instead}, or delete this one",
            data={"fingerprint": self.fingerprint, "fingerprint_now": client.info.fingerprint},
        )

    def set_model(self, info: ModelInfo) -> None:
        self.saved_text = None
        self.fingerprint, self.hash = info.fingerprint, info.vocab_hash

    async def save_text(self, model: ModelSource, history: History, requester: Requester) -> None:
        """Save the text of *history*, if the model of its tokens is about to be unloaded.

        :raises InferdError: that model cannot detokenize it.
        """
        if model.predecessor(self.hash) is not None:
            self.saved_text = await self._text(model, history, requester)

    async def retokenize(
        self,
        model: ModelSource,
        client: TextClient,
        history: History,
        requester: Requester,
        *,
        refuses_unread: bool = False,
    ) -> None:
        """Retokenize *history* for the model that has the name now. Images and sounds that it
        cannot read are texts, unless *refuses_unread*.

        :raises InvalidArgument: its text is lost.
        :raises UnsupportedOperation: the model cannot read an image or sound, and *refuses_unread*.
        """
        text = await self._text(model, history, requester)
        if text is None and not history.messages:
            raise InvalidArgument(
                f"the history has tokens of another vocabulary than model {model.name!r} has",
                hint="reset the context, or give it a new input without `append`",
            )
        if refuses_unread and history.items and not history.messages:
            raise UnsupportedOperation(
                "the history is raw text with images or sounds, which another model does not read",
                hint="reset the session, or let `media-on-swap` be `note`",
            )
        await history.retokenize(client, text or b"", refuses_unread=refuses_unread)
        self.hash = client.info.vocab_hash

    async def _text(
        self, model: ModelSource, history: History, requester: Requester
    ) -> bytes | None:
        predecessor = model.predecessor(self.hash)
        if predecessor is None or history.messages:
            return self.saved_text
        try:
            text = await retry_query(
                predecessor.ready,
                lambda client: self._detokenize(client.texts_of(requester), history),
            )
        except WorkerCrashed:
            if model.predecessor(self.hash) is predecessor:
                raise
            text = None
        # The predecessor may have been unloaded meanwhile; the text was saved before that.
        return self.saved_text if text is None else text

    async def _detokenize(self, client: TextClient, history: History) -> bytes | None:
        """Return the text of a prompt, without its BOS token, and with notes on its images and
        sounds.
        """
        if client.info.vocab_hash != self.hash:
            return None  # its worker has died, and its file was exchanged meanwhile
        first = await client.tokenize(b"", special=True, bos=True)
        prompt, text = history.prompt, b""
        at = len(first) if prompt[: len(first)] == first else 0
        for item, (begin, size) in zip(history.items, items_of(prompt), strict=True):
            text += await client.detokenize(prompt[at:begin])
            text += b"" if item.index else note_on(item.content.kind).encode()
            at = begin + size
        return text + await client.detokenize(prompt[at:])
