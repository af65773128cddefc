"""The wasi-nn calls as a Wasm guest makes them: compute a token, read it, repeat."""

import json
import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"

with inferd.Client() as client:
    config = json.dumps({"ctx-size": 1024, "n-predict": 32})
    graph = client.load_by_name_with_config(MODEL, config)
    context = client.init_execution_context(graph)
    client.set_input(context, 1, json.dumps({"temp": 0}))  # index 1: parameters
    client.set_input(context, 0, "The quick brown fox")  # any other index: the prompt
    try:
        while True:
            client.compute_single(context)
            piece = client.get_output_single(context, 0)
            print(piece.decode(), end="", flush=True)
    except inferd.EndOfSequence:
        print()
    print(json.loads(client.get_output(context, 1))["stop_reason"])
    client.fini_single(context)
    client.finalize_execution_context(context)
    client.unload(graph)
