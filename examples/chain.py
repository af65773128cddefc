"""A chain of models: find a passage, answer from it, summarise; memory may fit one at a time."""

import os
import sys

import inferd

MODELS = ("gemma3-270m-base", "smollm2", "gemma3-270m-base")
SEARCH, ANSWER, SUMMARISE = (sys.argv[1:] * 3)[:3] or MODELS
TEXTS = [
    "The library opens at nine and closes at six.",
    "Bicycles may be parked behind the main building.",
    "Lunch is served in the canteen from noon until two.",
]
QUESTIONS = ["When does the library open?", "Where may I park my bicycle?"]
OPTIONS = {"n-predict": 24, "temp": 0, "stop": ["\n"]}
# The state of a session with an id is on disk before its model is unloaded for another one.
NAME = f"chain-{os.getpid()}"


def product(a: list[float], b: list[float]) -> float:
    """Return the dot product: the cosine, since all vectors have length 1."""
    return sum(x * y for x, y in zip(a, b, strict=True))


with inferd.Client() as client:
    vectors = client.embed(SEARCH, TEXTS)
    searched = client.embed(SEARCH, QUESTIONS)
    with (  # opening a session loads its model, so the one that is used first is last
        client.session(SUMMARISE, session_id=f"{NAME}-notes", raw=True, options=OPTIONS) as notes,
        client.session(ANSWER, session_id=f"{NAME}-answers", options=OPTIONS) as answers,
    ):
        for question, wanted in zip(QUESTIONS, searched, strict=True):
            scores = [product(wanted, vector) for vector in vectors]
            answer = answers.chat(f"{TEXTS[scores.index(max(scores))]} {question}")
            note = notes.chat(f"\n- Question: {question} Answer: {answer} Summary:")
            reused = [session.metadata["cached_tokens"] for session in (answers, notes)]
            print(f"{question} {answer.strip()!r} in short: {note.strip()!r} reused: {reused}")
        answers.delete()
        notes.delete()
