"""Print an answer as it is generated, then its statistics."""

import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
OPTIONS = {"n-predict": 80, "temp": 0.7, "seed": 42, "stop": ["\n\n"]}

with inferd.Client() as client, client.session(MODEL, options=OPTIONS) as session:
    for piece in session.stream("Describe the sea."):
        print(piece, end="", flush=True)
    print()
    for key in ("stop_reason", "input_tokens", "output_tokens", "ttft_ms", "predicted_ms"):
        print(f"{key:14} {session.metadata[key]}")
