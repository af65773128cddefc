"""A program that sends a whole conversation with each request, by a real chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from inferd.backends import Rendering
from inferd.backends.errors import InvalidArgument
from inferd.scheduler.messages import pack_tokens
from inferd.scheduler.owner import Owner
from inferd.scheduler.prefix import common_prefix
from inferd.sessions.entries import Replay, TurnPiece
from inferd.sessions.history.history import History
from inferd.sessions.history.recent import RecentChats
from tests.sessions.answers.answer_messages import TOOLS, AnswerMessage, call
from tests.sessions.answers.written_answers import USER, Unwritable, WrittenAnswers
from tests.sessions.history.test_history import ChatClient, ids

OWNER = Owner(1)
WITH_TOOLS = Rendering(tools=TOOLS)
ANSWERS = (
    AnswerMessage("", "I look for Rome.", (call("weather", place="Rome"),)),
    AnswerMessage("", "Now Oslo.", (call("weather", place="Oslo", days=2),)),
    AnswerMessage("Rome is sunny.", "Both are known."),
)


class TemplateClient(ChatClient):
    """Renders by a chat template; a token is a character."""

    def __init__(self, answers: WrittenAnswers):
        super().__init__()
        self._answers = answers

    def template(self, messages: Sequence[dict[str, Any]], rendering: Rendering) -> str:
        try:
            return self._answers.render(messages, prompt=rendering.add_generation_prompt)
        except Unwritable as exc:
            raise InvalidArgument(str(exc)) from None


@dataclass
class Loop:
    """The texts that the requests of a loop compute again, and the first cause."""

    again: list[str] = field(default_factory=list)
    why: str = ""

    def tokens(self, count: Callable[[str], int]) -> int:
        return sum(map(count, self.again))


async def run_loop(answers: WrittenAnswers, *, reasoning: bool, recent: bool = True) -> Loop:
    """Run the loop. The program sends the reasoning of old answers back, or does not; the daemon
    knows its recent chats, or does not.
    """
    chats = RecentChats() if recent else RecentChats(chats_max=0)
    client, conversation, found, computed = TemplateClient(answers), [USER], Loop(), list[int]()
    given = [message for message in ANSWERS if answers.form.calls != "none" or not message.calls]
    for number, message in enumerate([*given, None]):
        history, at = chats.find(OWNER, "model", conversation) or (History(), 0)
        await history.add_messages(client, conversation[at:], WITH_TOOLS, answers.tool_use)
        shared = common_prefix(computed, history.prompt)
        if shared < len(computed):
            found.again.append("".join(map(chr, computed[shared:])))
            found.why = found.why or history.recomputed.why or "the rendered text differs"
        if message is None:
            break
        prompt = "".join(map(chr, history.prompt))
        text = _written(answers, message, conversation, prompt)
        piece = TurnPiece(tokens=pack_tokens(ids(text)), text=text.encode())
        answered = history.after(Replay(history.prompt, (piece,)))
        chats.add(OWNER, "model", conversation, history, piece)
        computed = answered.prompt
        parsed = answers.parse(prompt, [text])
        sent = {**answered.client_messages[-1], "content": parsed.content}
        sent["reasoning_content"] = parsed.reasoning
        if not reasoning:
            del sent["reasoning_content"]
        conversation = [*conversation, sent, *_next(sent, number)]
    return found


def _written(
    answers: WrittenAnswers,
    message: AnswerMessage,
    conversation: Sequence[dict[str, Any]],
    prompt: str,
) -> str:
    """Return what the model writes for *message*, without reasoning if the prompt asks for none. In
    a conversation, some templates do not write an answer as they request it.
    """
    for given in (message, replace(message, reasoning="")):
        with suppress(Unwritable):
            for answer in answers.written(given, conversation):
                if answer.prompt == prompt:
                    return answer.text
    return answers.written(message)[0].text


def _next(answer: dict[str, Any], number: int) -> list[dict[str, Any]]:
    calls = answer.get("tool_calls", ())
    return [
        {
            "role": "tool",
            "tool_call_id": each["id"],
            "name": each["function"]["name"],
            "content": f"result {number}",
        }
        for each in calls
    ] or [{"role": "user", "content": f"question {number}"}]
