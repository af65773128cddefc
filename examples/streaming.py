"""Print an answer as it is generated, then its statistics."""

import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
OPTIONS = {"n-predict": 80, "temp": 0.7, "seed": 42, "stop": ["\n\n"]}

with inferd.Client() as client, client.session(MODEL, options=OPTIONS) as session:
    for piece in session.stream("Describe the sea."):
        print(piece, end="", flush=True)
    print()
    found = session.metadata
    print(f"{found['output_tokens']} tokens in {found['predicted_ms']:.0f} ms")
    print(f"first token after {found['ttft_ms']:.0f} ms, stopped by {found['stop_reason']}")
