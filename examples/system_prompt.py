"""A system prompt, several roles in one turn, and a session whose history is cleared."""

import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
OPTIONS = {"n-predict": 40, "temp": 0}

with inferd.Client() as client:
    system = "You answer in one short sentence."
    with client.session(MODEL, system=system, options=OPTIONS) as session:
        print("1:", session.chat("What is rain?"))
        turn = [
            {"role": "user", "content": "What is snow?"},
            {"role": "assistant", "content": "Frozen rain."},
            {"role": "user", "content": "And hail?"},
        ]
        print("2:", session.chat(turn))
        session.reset()  # clears the history
        print("3:", session.chat("What did I ask first?"))
