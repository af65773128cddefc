"""Two models: the graph magika finds the type of a file, and a language model explains it."""

import json
import sys
from importlib.resources import files
from pathlib import Path

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
FILE = Path(sys.argv[2] if len(sys.argv) > 2 else __file__)
# PyPI's package magika has the graph, and the names of the types that it knows.
CONFIG = files("magika") / "models" / "standard_v3_3" / "config.min.json"
TYPES = json.loads(CONFIG.read_text())["target_labels_space"]
END, PADDING = 1024, [256] * 1024

data = FILE.read_bytes().strip()
first, last = list(data[:END]), list(data[-END:])
numbers = (first + PADDING)[:END] + (PADDING + last)[-END:]

with inferd.Client() as client:
    outputs = client.graph("magika").run({"bytes": [numbers]})
    [scores] = outputs["target_label"]
    best = int(scores.argmax())
    print(f"{FILE.name}: {TYPES[best]} ({scores[best]:.0%})")
    question = f"What is a file of the type {TYPES[best]!r}? Answer in one sentence."
    print(client.chat(MODEL, question, temp=0, n_predict=60, timeout=600))
