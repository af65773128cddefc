"""Leaving a stream cancels it: the daemon stops before its next step; the session continues."""

import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"

with inferd.Client() as client, client.session(MODEL) as session:
    read = 0
    with session.stream("Count from one to one hundred, please, in words.") as stream:
        for piece in stream:
            print(piece, end="", flush=True)
            read += 1
            if read == 5:
                break  # leaving the `with` cancels the turn
    print(" … enough.")
    print("tasks under way:", len(client.queue()))
    print("the session continues:", session.chat("Say: done.", options={"n-predict": 8}))
