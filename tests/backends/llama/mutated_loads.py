"""Loads of mutated files, each in a process of its own, as a worker loads a model.

`python -m tools.mutated_models` runs them.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from inferd.backends import Chunk, InferdError, ModelSpec
from inferd.backends.encoder_prompts import as_prompt, encoded_size
from inferd.backends.llama.llama_log import capture
from inferd.backends.llama.loading.gguf_check import open_model_file, read_gguf
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.loading.memory_estimate import LlamaMemoryEstimator
from inferd.backends.llama.model import LlamaModel
from inferd.backends.params import SamplingParams
from tests.backends.llama.mutated_files import Variant

__all__ = ("Outcome", "load_variant", "load_variants")

MEMORY_BYTES_MAX = 4 << 30
"""Address space of a process."""
NEED_BYTES_MAX = 1 << 30
"""A daemon refuses a model that needs more than it has; none of the tiny ones does."""
SECONDS_MAX = 20
TEXT = "Hello, Wörld!\n 123 <s>".encode()


class Outcome(NamedTuple):
    """How the load of a variant ended.

    `refused` and `failed` are typed errors of inferd's checks, and of llama.cpp or after it.
    """

    name: str
    kind: str
    detail: str

    @property
    def is_finding(self) -> bool:
        """Whether a worker's process would have ended, or its error is not typed."""
        return self.kind not in ("refused", "failed", "loaded", "too large")


def load_variant(variant: Variant, path: Path) -> Outcome:
    """Write a variant to *path* and load it there in a new process."""
    path.write_bytes(variant.to_bytes())
    try:
        with open_model_file(str(path)) as fd:
            read_gguf(fd, path.name)
    except InferdError as exc:
        return Outcome(variant.name, "refused", exc.message)
    return Outcome(variant.name, *_in_process(lambda: _load(path)))


def _in_process(run: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Run a function in a new process; return its result, or how the process has ended."""
    with tempfile.TemporaryFile() as printed:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            _run_limited(run, write_end, printed.fileno())
        os.close(write_end)
        with open(read_end, "rb") as pipe:
            given = pipe.read().decode("utf-8", "replace")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        printed.seek(0)
        words = printed.read().decode("utf-8", "replace").strip()
    if status == 0:
        kind, _, detail = given.partition(" ")
        return kind.replace("_", " "), detail
    kind = signal.Signals(-status).name if status < 0 else f"exit {status}"
    return kind, words[-2000:]


def _run_limited(run: Callable[[], tuple[str, str]], result: int, printed: int) -> None:
    status = 1
    try:
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(SECONDS_MAX)
        kind, detail = run()
        os.write(result, f"{kind.replace(' ', '_')} {detail[:4000]}".encode())
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(status)


def _load(path: Path) -> tuple[str, str]:
    """Load a model and use it, as a worker does before it reports that the model is loaded."""
    spec = ModelSpec(
        name="m", path=str(path), slots=2, ctx_size=256, batch_size=32, threads=1, n_gpu_layers=0
    )
    try:
        with closing(LlamaMemoryEstimator(spec)) as estimator:
            need = estimator.need(estimator.shape)
        if need.total > NEED_BYTES_MAX:
            return "too large", str(need.total)
        model = load_llama(spec, lambda _: True)
    except InferdError as exc:
        return "failed", f"{type(exc).__name__}: {exc.message}"
    try:
        _use(model)
    except InferdError as exc:
        return "failed", f"later, {type(exc).__name__}: {exc.message}"
    finally:
        model.close()
    return "loaded", ""


def _use(model: LlamaModel) -> None:
    info = model.info
    for token in range(info.vocab_size):
        model.piece(token), model.is_control(token), model.is_eog(token)
    tokens = model.tokenize(TEXT, special=True, bos=True)[:20] or [0]
    if not info.generates:
        embedder = model.embedder()
        embedder.start_text(0, embedder.info.pooling)
        embedder.step([Chunk(0, tokens, 0, logits=True)])
        embedder.take_embedding(0, 2)
        return
    if info.decoder_start_token is not None:
        tokens = as_prompt(tokens[:19], info.decoder_start_token)
        tokens = tokens[: encoded_size(tokens, info.decoder_start_token)]
    model.step([Chunk(0, tokens, 0, logits=True)])
    with closing(model.sampler(SamplingParams(), tokens)) as sampler:
        for index in range(3):
            token = model.sample(0, sampler, index)
            model.step([Chunk(0, [token], len(tokens) + index, logits=True)])
    model.trim(0, 0)


def load_variants(variants: Iterable[Variant], directory: Path) -> Iterator[Outcome]:
    """Load each variant in turn; yield how each load has ended."""
    capture()
    gc.collect()
    gc.freeze()  # else each process copies the memory of all variants
    for variant in variants:
        yield load_variant(variant, directory / f"variant-{os.getpid()}.gguf")
