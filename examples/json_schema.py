"""Extract data from a text as JSON that fits a schema."""

import json
import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "degrees": {"type": "integer", "minimum": -60, "maximum": 60},
        "sky": {"enum": ["clear", "cloudy", "rain", "snow"]},
    },
    "required": ["city", "degrees", "sky"],
}
OPTIONS = {"json-schema": SCHEMA, "n-predict": 80, "temp": 0}

with inferd.Client() as client, client.session(MODEL, options=OPTIONS) as session:
    answer = session.chat("Describe the weather as JSON: In Oslo it snows at 4 degrees below zero.")
    try:
        weather = json.loads(answer)
    except ValueError:  # cut off at `n-predict`, or by a model without grammars such as `echo`
        print("incomplete:", session.metadata["stop_reason"], answer)
    else:
        print(weather["city"], weather["degrees"], weather["sky"])
