"""The vocabulary of a history, and its retokenization for a model with another one."""

from __future__ import annotations

from ...backends import ModelInfo
from ...backends.errors import InvalidArgument, WorkerCrashed
from ...scheduler.priority import Requester
from ..worker_client import ModelSource, TextClient, retry_query
from .history import History


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
        """The memory that its text takes."""
        return len(self.saved_text or b"")

    def branch(self) -> HistoryVocabulary:
        """Return the vocabulary of a new session with the same history."""
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
        """Note the model of the history's token ids."""
        self.saved_text = None
        self.fingerprint, self.hash = info.fingerprint, info.vocab_hash

    async def save_text(self, model: ModelSource, history: History, requester: Requester) -> None:
        """Save the text of *history*, if the model of its tokens is about to be unloaded.

        :raises InferdError: that model cannot detokenize it.
        """
        if model.predecessor(self.hash) is not None:
            self.saved_text = await self._text(model, history, requester)

    async def retokenize(
        self, model: ModelSource, client: TextClient, history: History, requester: Requester
    ) -> None:
        """Retokenize *history* for the model that has the name now.

        :raises InvalidArgument: its text is lost.
        """
        text = await self._text(model, history, requester)
        if text is None and not history.messages:
            raise InvalidArgument(
                f"the history has tokens of another vocabulary than model {model.name!r} has",
                hint="reset the context, or give it a new input without `append`",
            )
        await history.retokenize(client, text or b"")
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
                lambda client: self._detokenize(client.texts_of(requester), history.prompt),
            )
        except WorkerCrashed:
            if model.predecessor(self.hash) is predecessor:
                raise
            text = None
        # The predecessor may have been unloaded meanwhile; the text was saved before that.
        return self.saved_text if text is None else text

    async def _detokenize(self, client: TextClient, prompt: list[int]) -> bytes | None:
        """Return the text of a prompt, without its BOS token."""
        if client.info.vocab_hash != self.hash:
            return None  # its worker has died, and its file was exchanged meanwhile
        first = await client.tokenize(b"", special=True, bos=True)
        begins = prompt[: len(first)] == first
        return await client.detokenize(prompt[len(first) if begins else 0 :])
