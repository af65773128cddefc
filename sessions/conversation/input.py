"""A session's input: text and messages added to its history, and rewinds of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio

from ...backends import Rendering
from ...backends.errors import InvalidArgument, PromptTooLong, TooLarge
from ..answers.calls import ToolUse
from ..history.history import History
from ..history.overflow import ContextLimit
from ..memory import memory_bytes
from ..table import SessionCall, SessionState, step
from ..turn.options import CHAT_TEMPLATE, NO_OPTIONS, NO_TEMPLATE
from ..worker_client import WorkerClient
from .core import BeforeInput, Overlong, SessionCore
from .model_link import ModelLink

MESSAGES_BYTES_MAX = 8 << 20
"""Bound on the memory of one history's messages, because each turn sends all of them to the worker,
for the template.
"""


class SessionInput:
    """The input of a session, which owns this. Input replaces the history or, with the parameter
    `append`, extends it.
    """

    def __init__(self, core: SessionCore, link: ModelLink):
        self._core, self._link = core, link
        self._starting = anyio.Lock()
        """Held from the input of a turn until its start."""

    async def set_input(self, text: bytes) -> int:
        """Make *text* the prompt, or append it to the history; return the number of its tokens. For
        a text too long for any context, return the least number that it can have; the next turn is
        refused.

        :raises SessionBusy: a turn is under way.
        """
        core = self._core
        async with self._link.exclusive():
            appends = bool(core.settings.parameters.standing("append"))
            before, overlong = core.conversation.last.overlong, None
            try:
                history, tokens, unused = await self._with_text(text, appends=appends)
            except PromptTooLong as exc:
                tokens, unused = exc.data["prompt_tokens"], NO_TEMPLATE
                history = core.conversation.current_history() if appends else History()
                overlong = Overlong(len(text), tokens, exc.data["ctx_size"])
            if appends and before is not None:
                size, tokens = before.size + len(text), before.tokens + tokens
                overlong = before._replace(size=size, tokens=tokens)
                history = core.conversation.current_history()
            core.accept_input(history, unused)
            core.conversation.last.overlong = overlong
        await core.wait_recorded()
        return tokens

    async def add_text(self, text: bytes, options: Mapping[str, Any] = NO_OPTIONS) -> BeforeInput:
        """Append *text* to the history, for a turn with *options*; return the session before the
        input.

        :raises SessionBusy: a turn is under way.
        :raises PromptTooLong: no context holds it.
        """
        async with self._link.exclusive():
            overlong = self._core.conversation.last.overlong
            if overlong is not None:
                raise overlong.error(len(self._core.conversation.prompt))
            history, _, unused = await self._with_text(text, options, appends=True)
            before = self._core.accept_turn_input(history, unused)
        return await self._record_input(before)

    async def add_tokens(self, tokens: list[int]) -> BeforeInput:
        """Append token ids to the history, for a turn; return the session before the input.

        :raises SessionBusy: a turn is under way.
        :raises InvalidArgument: there are none, or one is not in the model's vocabulary.
        """
        async with self._link.exclusive():
            overlong = self._core.conversation.last.overlong
            if overlong is not None:
                raise overlong.error(len(self._core.conversation.prompt))
            step(self._core.state, SessionCall.SET_INPUT)
            append = bool(self._core.conversation.prompt)
            unused = await self._link.query(
                lambda c: _check_tokens(c, tokens), new_history=not append
            )
            history = self._core.conversation.current_history()
            history.append_tokens(tokens) if append else history.replace_tokens(tokens)
            before = self._core.accept_turn_input(history, unused)
        return await self._record_input(before)

    async def _with_text(
        self, text: bytes, options: Mapping[str, Any] = NO_OPTIONS, *, appends: bool
    ) -> tuple[History, int, Mapping[str, str]]:
        """Return the history with *text*, the number of the text's tokens, and the unused
        parameters.
        """
        step(self._core.state, SessionCall.SET_INPUT)
        append = appends and bool(self._core.conversation.prompt)
        tokens, unused = await self._link.query(
            lambda c: self._tokenize(c, text, options, bos=not append), new_history=not append
        )
        history = self._core.conversation.current_history()
        history.append_tokens(tokens) if append else history.replace_tokens(tokens)
        return history, len(tokens), unused

    async def _tokenize(
        self, client: WorkerClient, text: bytes, options: Mapping[str, Any], *, bos: bool
    ) -> tuple[list[int], Mapping[str, str]]:
        texts = client.texts_of(self._core.requester)
        limit = self._core.settings.parameters.context_limit(
            options, client.info.ctx_size, chat=False
        )
        tokens = await texts.tokenize(
            text, special=True, bos=bos, turn=True, cut_behind=limit.cut_behind
        )
        return tokens, client.info.unused | NO_TEMPLATE

    async def add_messages(
        self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any] = NO_OPTIONS
    ) -> BeforeInput:
        """Add chat messages to the history by the model's template, which gets the parameters of a
        turn with *options*. After raw text, begin a new history. Return the session before the
        input.
        """
        parameters = self._core.settings.parameters
        rendering = parameters.rendering(options)
        async with self._link.exclusive():
            step(self._core.state, SessionCall.SET_INPUT)
            self._check_messages(messages)
            history, unused = await self._link.query(
                lambda c: self._with_messages(
                    *(c, messages, rendering),
                    parameters.tool_use(options, c.info.tool_format),
                    parameters.context_limit(options, c.info.ctx_size, chat=True),
                )
            )
            before = self._core.accept_turn_input(history, unused)
        return await self._record_input(before)

    async def _record_input(self, before: BeforeInput) -> BeforeInput:
        async with self._rolled_back_if_refused(before):
            await self._core.wait_recorded()
        return before

    def _check_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        """Check the size of a history with *messages*, before the template renders them.

        :raises TooLarge: the history's messages would exceed `MESSAGES_BYTES_MAX`.
        :raises QuotaExceeded: the owner's sessions would become too large.
        """
        history, more = self._core.conversation.history_state.now, memory_bytes(messages)
        before = history.messages_bytes - history.dropped_bytes
        if before + more > MESSAGES_BYTES_MAX:
            raise TooLarge(
                f"the history's messages have {before} bytes, {more} more were to be added; the"
                f" limit is {MESSAGES_BYTES_MAX}",
                hint="reset or rewind the context, or use shorter messages",
                data={"bytes": before, "more": more, "messages_bytes_max": MESSAGES_BYTES_MAX},
            )
        self._core.check_growth(more - history.dropped_bytes)  # these can be deleted

    async def _with_messages(
        self,
        client: WorkerClient,
        messages: Sequence[dict[str, Any]],
        rendering: Rendering,
        tool_use: ToolUse,
        limit: ContextLimit,
    ) -> tuple[History, Mapping[str, str]]:
        history = self._core.conversation.current_history()
        texts = client.texts_of(self._core.requester)
        await history.add_messages(texts, messages, rendering, tool_use, limit)
        return history, client.info.unused | _notes_on(history.messages, client.info.chat_notes)

    def reset_history(self, system: str | None = None) -> None:
        """Clear the history; *system* becomes the first message of the next one."""
        self._core.accept_history(SessionCall.RESET, History(system))

    async def rewind_history(self, turns: int | None, tokens: int | None) -> None:
        """Rewind by *turns*, or to the first *tokens* tokens; one of them is None.

        :raises SessionBusy: a turn is under way.
        :raises InvalidArgument: the history is shorter.
        """
        async with self._link.exclusive():
            step(self._core.state, SessionCall.REWIND)
            if self._core.conversation.vocabulary.saved_text is not None:
                await self._link.client()  # the saved text is that of the whole history
            history = self._core.conversation.current_history()
            if turns is not None:
                history.rewind_turns(turns)
            else:
                history.rewind_tokens(tokens or 0)
            call = SessionCall.REWIND if history.prompt else SessionCall.RESET
            self._core.accept_history(call, history)
        await self._core.wait_recorded()

    @contextlib.asynccontextmanager
    async def for_turn(
        self, add_input: Callable[[], Awaitable[BeforeInput | None]]
    ) -> AsyncIterator[None]:
        """Add the input of a turn, which is to start in the context. Another call's input waits;
        otherwise this turn would answer it, and neither could be rolled back.
        """
        async with self._starting, self._rolled_back_if_refused(await add_input()):
            yield

    @contextlib.asynccontextmanager
    async def _rolled_back_if_refused(self, before: BeforeInput | None) -> AsyncIterator[None]:
        """Restore the session *before* an input if the context raises an error and no turn has
        begun on the input, because a client that retries sends it again. If the engine refuses the
        turn later, `SessionCore.restore_if_refused` does the same.
        """
        core = self._core
        try:
            yield
        except BaseException:
            last = core.conversation.last
            begun = last.before is not before or last.turn is not None
            if before is not None and not begun and core.state is SessionState.READY:
                core.restore(before)
            await core.wait_recorded()
            raise


async def _check_tokens(client: WorkerClient, tokens: Sequence[int]) -> Mapping[str, str]:
    """Check token ids of a prompt; return the parameters without effect on its turn.

    :raises InvalidArgument: there are none, or one is not in the model's vocabulary.
    """
    size = client.info.vocab_size
    bad = next((token for token in tokens if not 0 <= token < size), None)
    if bad is not None or not tokens:
        raise InvalidArgument(
            "prompt_tokens: there are none"
            if bad is None
            else f"prompt_tokens: token {bad} is not in the model's vocabulary of {size}",
            hint="`tokenize` returns the tokens of a text",
            data={"vocab_size": size},
        )
    return client.info.unused | NO_TEMPLATE


def _notes_on(messages: Sequence[Mapping[str, Any]], notes: Mapping[str, str]) -> dict[str, str]:
    """Return the *notes* on the chat template that concern these messages, in one: those named by a
    role or a key of a message, and those on all chats.
    """
    present = {str(m["role"]) for m in messages} | {key for m in messages for key in m}
    found = [text for name, text in notes.items() if name == CHAT_TEMPLATE or name in present]
    return {CHAT_TEMPLATE: "; ".join(found)} if found else {}
