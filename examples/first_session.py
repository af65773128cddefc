"""A first conversation: one session, two questions; the model remembers the first."""

import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"

with inferd.Client() as client, client.session(MODEL, options={"n-predict": 60}) as session:
    print(session.chat("What is the capital of France?"))
    print(session.chat("And of Italy?"))
    metadata = session.metadata
    cached, total = metadata["cached_tokens"], metadata["input_tokens"]
    print(f"{cached} of {total} prompt tokens were already cached")
