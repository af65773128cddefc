"""Options of the engine are checked before a load, and without the engine."""

from __future__ import annotations

import pytest

from inferd.backends.engine_options import (
    CACHE_TYPES,
    ENGINE_OPTIONS,
    EngineOptions,
    cache_share,
    cache_share_max,
    check_heads,
    engine_options_of,
    head_sizes,
    is_quantized,
    read_engine_options,
    read_overrides,
)
from inferd.backends.errors import InvalidArgument
from inferd.backends.params import BY_NAME, read_options


def test_every_option_is_a_parameter_with_its_default() -> None:
    for name, default in ENGINE_OPTIONS.items():
        assert (BY_NAME[name].default, BY_NAME[name].level) == (default, "model")
    assert BY_NAME["cache-type-k"].choices == tuple(CACHE_TYPES)
    values = {**ENGINE_OPTIONS, "override-kv": ["a.b=int:1"], "numa": "isolate"}
    read = read_options(values, strict=True).values
    assert read_engine_options(read) == EngineOptions(override_kv=("a.b=int:1",), numa="isolate")
    assert engine_options_of({"temp": 1, "mmap": False}) == {"mmap": False}


def test_experts_of_all_layers_and_of_some_contradict_each_other() -> None:
    assert read_engine_options({"cpu-moe": True, "n-cpu-moe": 0}).cpu_moe
    assert read_engine_options({"cpu-moe": False, "n-cpu-moe": 3}).n_cpu_moe == 3
    with pytest.raises(InvalidArgument, match="those of the first 3") as caught:
        read_engine_options({"cpu-moe": True, "n-cpu-moe": 3})
    assert "n-cpu-moe to 0" in caught.value.hint


@pytest.mark.parametrize("cache_type", [t for t in CACHE_TYPES if is_quantized(t)])
def test_quantized_values_need_flash_attention(cache_type: str) -> None:
    values = {"cache-type-v": cache_type}
    for flash in ("auto", "on"):
        read_engine_options({**values, "flash-attn": flash})
    with pytest.raises(InvalidArgument, match="needs flash attention") as caught:
        read_engine_options({**values, "flash-attn": "off"})
    assert "flash-attn" in caught.value.hint
    read_engine_options({"cache-type-k": cache_type, "flash-attn": "off"})


def test_blocks_of_a_quantized_cache_divide_the_heads() -> None:
    options = EngineOptions(cache_type_k="q8_0", cache_type_v="f16")
    check_heads(options, {"k": 64, "v": 80})
    check_heads(options, {})
    with pytest.raises(InvalidArgument, match="heads have 80"):
        check_heads(options, {"k": 80})
    values: dict[str, object] = {"general.architecture": "a", "a.embedding_length": 576}
    assert head_sizes(values) == {"k": 0, "v": 0}
    values["a.attention.head_count"] = 9
    assert head_sizes(values) == {"k": 64, "v": 64}
    values["a.attention.value_length"] = 128
    assert head_sizes(values) == {"k": 64, "v": 128}
    assert head_sizes({**values, "a.attention.head_count": [9, 0]}) == {"k": 0, "v": 128}


def test_overrides_have_a_key_a_type_and_a_value() -> None:
    texts = ("a=int:-3", "b=float:0.5", "c=bool:true", "d=str:x=y:z", "e=bool:false", "f=str:")
    assert [value for _, value in read_overrides(texts)] == [-3, 0.5, True, "x=y:z", False, ""]
    long = "x" * 128
    for text in ("a", "a=1", "=int:1", "a=int:x", "a=bool:1", "a=map:1", f"a=str:{long}",
                 f"{long}=int:1", f"a=int:{1 << 63}", "a=int:1\0"):  # fmt: skip
        with pytest.raises(InvalidArgument, match="KEY=TYPE:VALUE"):
            read_overrides((text,))
    with pytest.raises(InvalidArgument, match="64 at most"):
        read_overrides(("a=int:1",) * 65)


def test_the_share_of_a_cache_is_its_size_in_f16() -> None:
    assert cache_share({}) == cache_share({"cache-type-k": "bf16"}) == 1
    assert cache_share({"cache-type-k": "f32"}) == 1.5
    both = {"cache-type-k": "q8_0", "cache-type-v": "q4_0"}
    assert cache_share(both) == pytest.approx((34 / 64 + 18 / 64) / 2)
    assert cache_share_max(both) == 34 / 64


def test_only_options_of_a_state_are_in_its_fingerprint() -> None:
    plain = EngineOptions()
    for name in (
        *("flash_attn", "mmap", "mlock", "numa", "threads_batch"),
        *("cpu_moe", "n_cpu_moe"),
    ):
        assert name not in plain.of_state
    assert {"cache_type_k", "rope_freq_base", "override_kv"} <= set(plain.of_state)
    assert plain.is_plain and EngineOptions(rope_freq_base=1e6).is_plain
    quantized = EngineOptions(cache_type_k="q8_0", rope_freq_base=1e6)
    assert not quantized.is_plain
    assert quantized.without_memory() == EngineOptions(rope_freq_base=1e6)


def test_guests_may_spell_options_as_other_runtimes_do() -> None:
    read = read_options(
        {"flash-attn": True, "use-mmap": False, "numa": False, "n_threads_batch": 2}
    )
    assert read.values == {"flash-attn": "on", "mmap": False, "numa": "off", "threads-batch": 2}
    assert read_options({"cache_type_k": "Q8-0", "numa": True}).values == {
        "cache-type-k": "q8_0", "numa": "distribute"
    }  # fmt: skip
