"""The weights that llama.cpp uses without adapters, by architecture.

Its graphs multiply them by `ggml_mul_mat` instead of `build_lora_mm` (`src/models/`), so that an
adapter of them would have no effect, and no error. `make archs` checks that each
other weight of its models has one.
"""

from __future__ import annotations

import re

__all__ = ("is_adapted",)

_BLOCK = re.compile(r"blk\.\d+\.")
_ALWAYS = "ssm_conv1d ssm_a ssm_d shortconv.conv ple_conv1d"
_LATENT = "attn_q attn_q_a attn_q_b attn_kv_a_mqa attn_kv_b attn_k_b attn_v_b"
_SPARSE = f"{_LATENT} output indexer.proj indexer.attn_k indexer.attn_q_b"
_HYPER = "output_hc_fn hc_attn_fn hc_ffn_fn"
_DELTA = (
    f"{_LATENT} output attn_k attn_v attn_qkv attn_output attn_gate"
    " ssm_f_a ssm_f_b ssm_g ssm_g_a ssm_g_b ssm_beta"
)
_EXPERTS = "ffn_gate_inp ffn_routed_up ffn_routed_down ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
_TIME_MIX = " ".join(f"time_mix_{name}{number}" for name in "wavg" for number in (1, 2))
_BY_ARCHITECTURE = {
    **dict.fromkeys(("deepseek2", "deepseek2-ocr", "mistral4"), f"{_LATENT} output"),
    **dict.fromkeys(("deepseek32", "glm-dsa", "dots3note"), _SPARSE),
    "deepseek4": f"{_HYPER} output attn_output_a attn_compressor_ape indexer_compressor_ape",
    **dict.fromkeys(("minicpm3", "plm"), _LATENT),
    "hy_v4": f"{_SPARSE} {_HYPER} attn_gate",
    **dict.fromkeys(("kimi-linear", "bailingmoe3"), _DELTA),
    "glm5-next": f"{_DELTA} {_SPARSE} {_HYPER} indexer_compressor_gate indexer_compressor_ape",
    "kimi-k3": f"{_DELTA} {_EXPERTS} ffn_gate ffn_up ffn_down",
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "ffn_latent_up ffn_latent_down"),
    "gemma3n": "altup_router altup_unembd_proj altup_proj",
    **dict.fromkeys(("rwkv6", "rwkv6qwen2"), "time_mix_w1 time_mix_decay_w1 time_mix_decay_w2"),
    **dict.fromkeys(("rwkv7", "arwkv7"), _TIME_MIX),
}
_WITHOUT = {name: frozenset(words.split()) for name, words in _BY_ARCHITECTURE.items()}
_NEVER = frozenset(_ALWAYS.split())


def is_adapted(weight: str, architecture: str) -> bool:
    """Return whether an adapter of a *weight* has an effect in a model of this *architecture*."""
    name = _BLOCK.sub("", weight.removesuffix(".weight"))
    return name not in _NEVER and name not in _WITHOUT.get(architecture, ())
