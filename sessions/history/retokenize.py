"""Which model's tokens a history is in, and how it is said again in those of another model."""

from __future__ import annotations

from ...backends import ModelInfo
from ...backends.errors import InvalidArgument, WorkerCrashed
from ..worker_client import ModelSource, Port, ask_again
from .history import History

__all__ = ("Vocabulary",)


class Vocabulary:
    """Owned by its session. `hash` and `fingerprint` are of the model that the session was in touch
    with last, `build` is its llama.cpp's. `carried` is the history's text, taken along when the
    model that it has token ids of was swapped.
    """

    def __init__(self, fingerprint: str = "", vocab_hash: str = ""):
        self.fingerprint, self.hash = fingerprint, vocab_hash
        self.build: tuple[int, str] = (0, "")
        self.carried: bytes | None = None
        self._retold: bytes | None = None

    def undone(self, before: Vocabulary) -> Vocabulary:
        """Return what it was *before*; the text of a history that was said again since is known."""
        if self.hash != before.hash:
            before.carried = self._retold
        return before

    def branch(self) -> Vocabulary:
        """Return that of a new session with the same history."""
        new = Vocabulary(vocab_hash=self.hash)
        new.carried = self.carried
        return new

    def is_another(self, info: ModelInfo) -> bool:
        """Tell whether a model has other tokens."""
        return self.hash not in ("", info.vocab_hash)

    def take(self, info: ModelInfo) -> None:
        """Be a model's: the history is in its tokens."""
        self.carried = None
        self.fingerprint, self.hash = info.fingerprint, info.vocab_hash
        self.build = (info.llama_build_number, info.llama_commit)

    async def carry(self, model: ModelSource, past: History) -> None:
        """Take the text of *past* along, if the model that has its tokens is about to leave.

        :raises InferdError: that cannot tell it.
        """
        if model.former(self.hash) is not None:
            self.carried = await self._text(model, past)

    async def retell(self, model: ModelSource, port: Port, past: History) -> None:
        """Say *past* in the tokens of the model that has the name now.

        :raises InvalidArgument: nobody knows its text any more.
        """
        text = await self._text(model, past)
        if text is None and not past.messages:
            raise InvalidArgument(
                f"the history has tokens of another vocabulary than model {model.name!r} has",
                hint="reset the context, or give it a new input without `append`",
            )
        await past.retell(port, text or b"")
        self.hash, self._retold = port.info.vocab_hash, text

    async def _text(self, model: ModelSource, past: History) -> bytes | None:
        former = model.former(self.hash)
        if former is None or past.messages:
            return self.carried
        try:
            text = await ask_again(former.ready, lambda port: self._said(port, past.prompt))
        except WorkerCrashed:
            if model.former(self.hash) is former:
                raise
            text = None
        # It may have left meanwhile: before that, the text was taken along.
        return self.carried if text is None else text

    async def _said(self, port: Port, prompt: list[int]) -> bytes | None:
        """Return the text of a prompt, without the mark that begins each."""
        if port.info.vocab_hash != self.hash:
            return None  # it died, and its file was exchanged meanwhile
        first = await port.tokenize(b"", special=True, bos=True)
        begins = prompt[: len(first)] == first
        return await port.detokenize(prompt[len(first) if begins else 0 :])
