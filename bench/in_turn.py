"""A program that runs a chain of models with llama-cpp-python and loads each model in turn.

It has one model in memory at a time: it loads a model, computes one call, and frees the model. The
KV state is lost with the model, so the program keeps each conversation's tokens and computes them
again. `python -m bench.in_turn` prints a line once it is ready, reads a job as JSON, and
writes the streams of its calls.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import llama_cpp
from llama_cpp import Llama

from inferd.backends.llama.llama_log import capture

from .chain_texts import ChainTexts, nearest
from .streams import Stream


class InTurn:
    """The models' files and contexts, and the conversations of one program."""

    def __init__(
        self, texts: ChainTexts, files: dict[str, str], sizes: dict[str, int], threads: int
    ):
        self.texts, self._files, self._sizes, self._threads = texts, files, sizes, threads
        self._histories: dict[str, list[int]] = {}
        self.streams: list[Stream] = []

    @contextmanager
    def _loaded(self, model: str, **options: Any) -> Iterator[Llama]:
        with closing(
            Llama(
                self._files[model],
                n_ctx=self._sizes[model],
                n_threads=self._threads,
                n_threads_batch=self._threads,
                verbose=False,
                **options,
            )
        ) as llama:
            yield llama

    def search(self, chain: int, vectors: list[list[float]]) -> str:
        """Return the passage nearest to a question. The first search embeds all passages."""
        requested_s = time.perf_counter()
        mean = llama_cpp.LLAMA_POOLING_TYPE_MEAN
        with self._loaded("search", embedding=True, pooling_type=mean) as llama:
            if not vectors:
                vectors += llama.embed(self.texts.passages, normalize=True)
            [question] = llama.embed([self.texts.questions[chain]], normalize=True)
        ended_s = time.perf_counter()
        self.streams.append(Stream(requested_s, (ended_s,), 0, 0, self.texts.label("search")))
        return self.texts.passages[nearest(question, vectors)]

    def turn(self, model: str, text: str, n_predict: int) -> str:
        """Return the answer to a conversation's next text."""
        requested_s = time.perf_counter()
        history = self._histories.setdefault(model, [])
        arrivals: list[float] = []
        with self._loaded(model) as llama:
            history += llama.tokenize(text.encode(), add_bos=not history)
            input_tokens = len(history)
            sampled = []
            for token in itertools.islice(llama.generate(history, temp=0.0), n_predict):
                sampled.append(token)
                arrivals.append(time.perf_counter())
            history += sampled
            answer: str = llama.detokenize(sampled).decode(errors="replace")
        self.streams.append(
            Stream(
                requested_s,
                tuple(arrivals),
                tokens=len(sampled),
                tokens_requested=n_predict,
                label=self.texts.label(model),
                input_tokens=input_tokens,
            )
        )
        return answer

    def run(self, n_predict: int) -> None:
        """Run all chains."""
        vectors: list[list[float]] = []
        for chain in range(len(self.texts.questions)):
            passage = self.search(chain, vectors)
            answer = self.turn("answer", self.texts.question(chain, passage), n_predict)
            self.turn("summarise", self.texts.summary(chain, answer), n_predict)


def main() -> None:
    """Run the job on standard input and print its streams."""
    capture()
    print("ready", flush=True)
    job = json.loads(sys.stdin.readline())
    program = InTurn(ChainTexts(**job["texts"]), job["files"], job["sizes"], job["threads"])
    program.run(job["n_predict"])
    print(json.dumps([stream.as_dict() for stream in program.streams]))


if __name__ == "__main__":
    main()
