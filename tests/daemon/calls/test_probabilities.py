"""`n-probs` over a real socket: in a stream's events, in the metadata of all other turns."""

from __future__ import annotations

from typing import Any

import pytest

from inferd import Client
from inferd.backends import SamplingParams
from inferd.backends.echo.options import EOG
from inferd.backends.errors import InvalidArgument
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner
from inferd.sessions.turn.turn import PROBABILITIES_MAX, Turn
from tests.raw import RawClient

ASKED = {"n-probs": 2}
LETTER = {"id": 97, "token": "a", "bytes": [97], "logprob": 0.0}


def chat(raw: RawClient, context: int, **options: Any) -> dict[str, Any]:
    turn = raw.call("chat", context=context, prompt="aa", raw=True, options=options)
    metadata: dict[str, Any] = turn["metadata"]
    return metadata


def test_a_whole_answer_has_probabilities_in_its_metadata_for_its_turn_only(raw: RawClient) -> None:
    context = raw.context("echo")
    sent = chat(raw, context, **ASKED)["completion_probabilities"]
    assert sent == [LETTER | {"top_logprobs": [LETTER]}] * 2
    after = chat(raw, context, logprobs=1, post_sampling_probs=True)["completion_probabilities"]
    letter = {"id": 97, "token": "a", "bytes": [97], "prob": 1.0}
    assert after[0] == letter | {"top_probs": [letter]}
    assert "completion_probabilities" not in chat(raw, context)


def test_a_stream_has_probabilities_with_its_tokens_and_not_again(client: Client) -> None:
    with client.session("echo") as session:
        stream = session.stream("aa", raw=True, options=ASKED)
        assert "".join(stream) == "aa"
        assert [one["id"] for one in stream.probabilities] == stream.tokens == [97, 97]
        assert "completion_probabilities" not in stream.metadata
        plain = session.stream("aa", raw=True)
        assert list(plain) and plain.probabilities == []


def test_single_tokens_have_probabilities_in_output_1(raw: RawClient) -> None:
    context = raw.context("echo")
    raw.set_input(context, b"aa")
    raw.set_input(context, b'{"n-probs": 2}', index=1)
    for count in (1, 2):
        raw.call("compute_single", context=context)
        assert len(raw.metadata(context)["completion_probabilities"]) == count


def test_more_than_the_bound_is_refused(raw: RawClient) -> None:
    context = raw.context("echo")
    chat(raw, context, **{"n-probs": 100})
    with pytest.raises(InvalidArgument, match=r"n-probs: 101 is outside 0 … 100"):
        chat(raw, context, **{"n-probs": 101})


def test_metadata_has_probabilities_of_the_first_tokens_up_to_a_bound() -> None:
    spec = m.TaskSpec(id=1, owner=Owner(1), tokens=b"", sampling=SamplingParams(n_probs=99))
    turn = Turn(None, spec, lambda _: None)  # type: ignore[arg-type]
    one = m.TokenLogprob(7, b"a", -1.0, [m.TokenLogprob(7, b"a", -1.0)] * 99)
    for _ in range(PROBABILITIES_MAX // 100 + 5):
        turn.report(m.Tokens(1, [7], b"a", logprobs=[one]))
    assert len(turn.logprobs) == PROBABILITIES_MAX // 100


def test_the_token_that_ends_an_answer_has_probabilities_of_its_own(client: Client) -> None:
    with client.session("echo") as session:
        reply = session.chat("a", raw=True, options=ASKED)
        end = {"id": EOG, "token": "", "bytes": [], "logprob": 0.0}
        assert reply.metadata["end_token"] == end | {"top_logprobs": [end]}
        assert len(reply.metadata["completion_probabilities"]) == 1
        cut = session.chat("aa", raw=True, options=ASKED | {"n-predict": 1})
        assert "end_token" not in cut.metadata
        assert "end_token" not in session.chat("a", raw=True).metadata
