"""Two models: the graph basic-pitch finds notes in a sound, and a language model explains them."""

import math
import sys
import wave
from array import array

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
RATE, WINDOW, LOWEST = 22_050, 43_844, 21
NAMES = ["C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B"]


def samples_of(file: str) -> list[float]:
    """Return the samples of a WAV file with one channel of 16 bits."""
    with wave.open(file) as wav:
        if (wav.getnchannels(), wav.getsampwidth(), wav.getframerate()) != (1, 2, RATE):
            sys.exit(f"{file} does not have one channel of 16 bits at {RATE} Hz")
        return [n / 32_768 for n in array("h", wav.readframes(wav.getnframes()))]


if len(sys.argv) > 2:
    samples = samples_of(sys.argv[2])
else:  # two seconds of a chord
    turns = (math.tau * n / RATE for n in range(WINDOW))
    samples = [sum(math.sin(hz * turn) / 5 for hz in (220, 277.18, 329.63)) for turn in turns]
windows = max(1, math.ceil(len(samples) / WINDOW))
data = array("f", samples + [0.0] * (windows * WINDOW - len(samples))).tobytes()
sound = inferd.Tensor(data=data, dimensions=[windows, WINDOW, 1], type="fp32")

with inferd.Client() as client:
    # The chances of the 88 keys at each time.
    chances = client.graph("basic-pitch").run({"0": sound})["StatefulPartitionedCall:1"]
    found = [LOWEST + key for key in range(88) if (chances[:, :, key] > 0.5).sum() > 10]
    notes = " ".join(f"{NAMES[key % 12]}{key // 12 - 1}" for key in found)
    print("notes:", notes)
    question = f"Which chord has the notes {notes}? Answer in one sentence."
    print(client.chat(MODEL, question, temp=0, n_predict=60, timeout=600))
