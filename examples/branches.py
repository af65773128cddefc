"""Three answers from one state, which is computed once, and a turn that is taken back."""

import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
OPTIONS = {"n-predict": 24}

with inferd.Client() as client, client.session(MODEL, options=OPTIONS) as session:
    session.chat("You will help me to name a boat. It is small, red and old.")
    for branch in session.fork(3):
        with branch:
            answer = branch.chat("Name it.")
            print(f"{answer.metadata['cached_tokens']:3} tokens were cached:", answer[:60])
    print("a mistake:", session.chat("I meant an aeroplane.")[:60])
    back = session.rewind(turns=1)  # back to the state from which it branched
    print(f"{back.tokens} tokens of history, {back.cached_tokens} of them kept")
    print("again:", session.chat("I meant a ship.")[:60])
