"""Let the model call a function: choose the tool, run it, answer with its result."""

import json
import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
PARAMETERS = {**NUMBERS, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Add two integers.", "parameters": PARAMETERS}
CALL = {
    "type": "object",
    "properties": {"name": {"const": "add"}, "arguments": PARAMETERS},
    "required": ["name", "arguments"],
}
OPTIONS = {"n-predict": 60, "temp": 0, "tools": [{"type": "function", "function": ADD}]}

with inferd.Client() as client, client.session(MODEL, options=OPTIONS) as session:
    # The schema forces a call, also from a model whose template does not know tools.
    answer = session.chat("What is 2 plus 3?", options={"json-schema": CALL})
    try:
        arguments = json.loads(answer)["arguments"]
    except ValueError:  # cut off at `n-predict`, or by a model without grammars such as `echo`
        print("no call:", answer)
    else:
        print("call: add", arguments)
        result = arguments["a"] + arguments["b"]
        print("answer:", session.chat([{"role": "tool", "content": str(result)}]))
