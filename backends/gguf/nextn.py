"""NextN layers in the header of a model's file."""

from __future__ import annotations

from collections.abc import Container, Mapping

_ARCHITECTURES = frozenset(
    (
        *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa"),
        *("glm4moe", "glm5-next", "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe"),
        *("qwen3next", "step35"),
    )
)
"""The architectures for whose NextN layers llama.cpp builds graphs (`LLM_GRAPH_TYPE_DECODER_MTP` in
`src/models/`).
"""


def nextn_layers(values: Mapping[str, object]) -> int:
    """Return the number of NextN layers that a header states by its *values*."""
    architecture = values.get("general.architecture")
    found = values.get(f"{architecture}.nextn_predict_layers", 0)
    return max(0, found) if isinstance(found, int) else 0


def nextn_refusal(values: Mapping[str, object], tensors: Container[str]) -> str:
    """Return the reason for which the NextN layers of a file with these *values* and *tensors*
    cannot draft, or empty. llama.cpp would abort.
    """
    architecture, layers = str(values.get("general.architecture")), nextn_layers(values)
    blocks = values.get(f"{architecture}.block_count", 0)
    if not layers or not isinstance(blocks, int):
        return "it has none"
    if architecture not in _ARCHITECTURES:
        return f"llama.cpp does not compute those of the architecture {architecture!r}"
    if layers > 1:
        return f"it has {layers}, of which each would predict another token; one is supported"
    if f"blk.{blocks - layers}.nextn.eh_proj.weight" not in tensors:
        return "its file leaves their tensors out"
    return ""
