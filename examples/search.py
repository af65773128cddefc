"""Search texts by meaning: embed them once, then compare each question with all of them."""

import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
TEXTS = [
    "The library opens at nine and closes at six.",
    "Bicycles may be parked behind the main building.",
    "Lunch is served in the canteen from noon until two.",
]
QUESTION = "When can I borrow books?"

with inferd.Client() as client:
    vectors = client.embed(MODEL, TEXTS)
    [question] = client.embed(MODEL, [QUESTION], priority="high")
# All vectors have length 1: the dot product is the cosine.
scores = [sum(a * b for a, b in zip(question, vector, strict=True)) for vector in vectors]
for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
    print(f"{score:.3f} {text}")
