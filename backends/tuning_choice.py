"""The setting with which a model is loaded, by records of measurements on this machine.

Pure, and loads no engine. `scheduler/policy/tuning.py` makes the decision that a record states.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

DEEP_TOKENS = 1500
"""The tokens before those of a deep probe."""


class Probe(msgspec.Struct, frozen=True):
    """A step in which each of *sequences* has *tokens* tokens behind *depth* others."""

    name: str
    sequences: int
    tokens: int
    depth: int


PROBES = (
    Probe("decode-1", 1, 1, 0),
    Probe("decode-4", 4, 1, 0),
    Probe("decode-16", 16, 1, 0),
    Probe("prompt", 1, 256, 0),
    Probe("deep-1", 1, 1, DEEP_TOKENS),
    Probe("deep-4", 4, 1, DEEP_TOKENS),
    Probe("deep-16", 16, 1, DEEP_TOKENS),
    Probe("deep-step", 1, 16, DEEP_TOKENS),
)
"""All probes; the deep ones, which need a context of their own, are last. A runner may lack those
with more sequences than the model has slots, and deep ones of several sequences, whose KV states
take much memory; `scheduler/policy/tuning.py` estimates their times from the others.
"""


class Setting(msgspec.Struct, frozen=True):
    """A way to compute: flash attention, the numbers of threads for steps of one token and of
    several, and the tokens of a micro-batch. 0 threads stands for as many as the model may use, 0
    threads-batch for `threads`, and a micro-batch of 0 for the size that suits the attention.
    """

    flash_attn: bool
    threads: int = 0
    threads_batch: int = 0
    ubatch: int = 0


class Sample(msgspec.Struct, frozen=True):
    """The *seconds* that the probe of that name took with a setting."""

    setting: Setting
    probe: str
    seconds: float


class ProbeRunner(Protocol):
    """Runs probes in contexts of its own over the weights of a loaded model.

    Owned by the engine's thread, in which all calls happen except `abort`.
    """

    probes: tuple[Probe, ...]
    """The probes that it can run."""

    def advance(self, probe: Probe, setting: Setting) -> float | None:
        """Do the next piece of work for *probe* with *setting*: prepare it, and return None; or
        compute it, and return its seconds. A piece that was aborted returns None, too, and the
        next call repeats it.

        :raises OutOfMemory: a context does not fit in memory.
        """

    def abort(self) -> None:
        """End the present piece within a node of the graph. Called by another thread; it has no
        effect between two pieces.
        """

    def close(self) -> None:
        """Free the contexts; a second call does nothing."""


LIKE_FACTOR_MAX = 2.0
"""Alike models differ by less than this factor in layers, embeddings, heads and weights."""


class Rule(NamedTuple):
    """Whether flash attention is on with a kind of CPU, and the measurement behind it."""

    flash_attn: bool
    source: str


RULES: Mapping[tuple[str, int], Rule] = {
    ("AuthenticAMD", 25): Rule(
        True,
        "with flash attention, an AMD EPYC (Zen 4) computed 100 short conversations of"
        " SmolLM2 135M in 68 instead of 80 s",
    ),
    ("AuthenticAMD", 26): Rule(
        True,
        "with flash attention, an AMD EPYC decoded 1, 4 and 16 streams of SmolLM2 135M at"
        " 1.10, 1.15 and 1.23 of the pace",
    ),
    ("GenuineIntel", 6): Rule(
        False,
        "without flash attention, an Intel CPU with AMX computed a token of SmolLM2 135M"
        " behind 2048 others in 20 instead of 39 ms",
    ),
}
"""By vendor and family of the CPU."""
DEFAULT_REASON = "nothing was measured on this kind of CPU"

Source = Literal["configured", "measured", "like", "rule", "default"]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a loaded model on which the speed of its settings depends."""

    architecture: str
    layers: int
    embedding: int
    heads: int
    kv_heads: int
    head_k: int
    head_v: int
    size_bytes: int
    """Bytes of all weights, which tell quantizations apart."""
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"


class TuningRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A measured choice for a model's shape on a CPU with a build of the engine."""

    shape: ModelShape
    cpu: str
    """See `cpu_key`."""
    build: str
    """The build of llama.cpp."""
    chosen: Setting
    reason: str
    ratios: dict[str, float] = {}
    """By probe, the time with the other kind of attention as a share of the time without it."""
    measured_at: float = 0.0
    """Seconds since the epoch."""
    requested: bool = False
    """Whether `inferd tune` measured it."""


class ChosenSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The setting of a load, with its source and the reason for people."""

    setting: Setting
    source: Source
    reason: str


class CpuFacts(msgspec.Struct, frozen=True):
    """The CPU as /proc/cpuinfo states it, and the number of cores that may be used."""

    vendor: str
    family: int
    model: int
    stepping: int
    name: str
    cores: int

    @property
    def key(self) -> str:
        """The text by which records of this CPU are found."""
        numbers = f"{self.family}-{self.model}-{self.stepping}"
        return f"{self.vendor} {numbers} {self.name}, {self.cores} cores"


UNKNOWN_CPU = CpuFacts("", 0, 0, 0, "", 0)


class LoadTuning(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a `ModelSpec` by which a load chooses its setting."""

    cpu: CpuFacts
    records: tuple[TuningRecord, ...] = ()
    """Those of this CPU and build."""
    keeps_threads: bool = False
    """Whether the threads are configured."""


class ModelTuning(msgspec.Struct, frozen=True, kw_only=True):
    """The setting of a loaded model, and the facts for measuring another one."""

    shape: ModelShape
    cpu: str
    chosen: ChosenSetting
    other_fingerprint: str = ""
    """The fingerprint of the model with the other kind of attention."""
    keeps_threads: bool = False


def read_cpu(text: str, cores: int) -> CpuFacts:
    """Return the facts in the *text* of /proc/cpuinfo; those that it lacks are empty or 0."""
    fields: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()

    def number(*names: str) -> int:
        value = next((fields[name] for name in names if name in fields), "")
        try:
            return int(value, 0)
        except ValueError:
            return 0

    return CpuFacts(
        fields.get("vendor_id") or fields.get("CPU implementer", ""),
        number("cpu family", "CPU architecture"),
        number("model", "CPU part"),
        number("stepping", "CPU revision"),
        fields.get("model name", ""),
        cores,
    )


def this_cpu(cores: int = 0) -> CpuFacts:
    """Return the facts about this machine's CPU with *cores* of it; 0: all that this process may
    use.
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            text = file.read(1 << 16)
    except OSError:
        text = ""
    return read_cpu(text, cores or len(os.sched_getaffinity(0)))


def shape_of(
    values: Mapping[str, object], size_bytes: int, options: Mapping[str, Any]
) -> ModelShape:
    """Return the shape of a model by the *values* of its file's header and its engine *options*."""
    architecture = values.get("general.architecture")

    def number(name: str) -> int:
        value = values.get(f"{architecture}.{name}")
        return value if isinstance(value, int) and value > 0 else 0

    heads, embedding = number("attention.head_count"), number("embedding_length")
    usual = embedding // heads if heads else 0
    return ModelShape(
        architecture=str(architecture or "")[:64],
        layers=number("block_count"),
        embedding=embedding,
        heads=heads,
        kv_heads=number("attention.head_count_kv") or heads,
        head_k=number("attention.key_length") or usual,
        head_v=number("attention.value_length") or usual,
        size_bytes=size_bytes,
        cache_type_k=str(options.get("cache-type-k", "f16")),
        cache_type_v=str(options.get("cache-type-v", "f16")),
    )


def shape_distance(a: ModelShape, b: ModelShape) -> float | None:
    """Return how much two shapes differ, 0.0 for equal ones; None if they are not alike."""
    fixed = ("head_k", "head_v", "cache_type_k", "cache_type_v")
    if any(getattr(a, name) != getattr(b, name) for name in fixed):
        return None
    distance = 0.0
    for name in ("layers", "embedding", "heads", "kv_heads", "size_bytes"):
        one, other = getattr(a, name), getattr(b, name)
        if one <= 0 or other <= 0:
            return None
        factor = abs(math.log(one / other))
        if factor > math.log(LIKE_FACTOR_MAX):
            return None
        distance += factor
    return distance + (0.0 if a.architecture == b.architecture else 0.1)


def choose_setting(
    configured: Setting | None,
    shape: ModelShape,
    cpu: CpuFacts,
    build: str,
    records: Iterable[TuningRecord],
) -> ChosenSetting:
    """Return the setting of a load: the *configured* one, else the one recorded for this shape,
    CPU and build, else that of the most similar shape on this machine, else by the CPU's family.
    Threads and micro-batches are taken only from a record of this shape.
    """
    if configured is not None:
        return ChosenSetting(setting=configured, source="configured", reason="set for this model")
    here = [r for r in records if (r.cpu, r.build) == (cpu.key, build)]
    for record in here:
        if record.shape == shape:
            return ChosenSetting(setting=record.chosen, source="measured", reason=record.reason)
    alike = [
        (distance, -record.measured_at, n)
        for n, record in enumerate(here)
        if (distance := shape_distance(shape, record.shape)) is not None
    ]
    if alike:
        record = here[min(alike)[2]]
        reason = f"measured with a model of similar shape ({record.shape.architecture}, "
        reason += f"{record.shape.layers} layers): {record.reason}"
        return ChosenSetting(
            setting=Setting(record.chosen.flash_attn), source="like", reason=reason
        )
    return choose_by_cpu(cpu)


def choose_by_cpu(cpu: CpuFacts) -> ChosenSetting:
    """Return the setting of a load on a machine where no similar model was measured."""
    rule = RULES.get((cpu.vendor, cpu.family))
    if rule is not None:
        return ChosenSetting(setting=Setting(rule.flash_attn), source="rule", reason=rule.source)
    return ChosenSetting(setting=Setting(False), source="default", reason=DEFAULT_REASON)
