"""Let the model call a function: choose the tool, run it, answer with its result."""

import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
PARAMETERS = {**NUMBERS, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Add two integers.", "parameters": PARAMETERS}
OPTIONS = {"n-predict": 60, "temp": 0, "tools": [{"type": "function", "function": ADD}]}

with inferd.Client() as client, client.session(MODEL, options=OPTIONS) as session:
    # `required` forces a call, also from a model whose template does not know tools.
    reply = session.chat("What is 2 plus 3?", options={"tool-choice": "required"})
    if not reply.tool_calls:  # cut off at `n-predict`, or a model without grammars such as `echo`
        print("no call:", reply)
    for call in reply.tool_calls:
        print("call:", call.name, call.values)
        result = str(call.values["a"] + call.values["b"])
        message = {"role": "tool", "tool_call_id": call.id, "content": result}
        print("answer:", session.chat([message], options={"tool-choice": "none"}))
