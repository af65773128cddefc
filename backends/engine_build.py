"""Which llama.cpp the pinned engine is, known without loading it."""

from __future__ import annotations

LLAMA_COMMIT = "0c1e57098"
"""ggml-org/llama.cpp as vendored by llama-cpp-python 0.3.36; the library doesn't tell it."""

LLAMA_BUILD_NUMBER = 0
"""0: unknown. llama.cpp counts commits of its repository, which the source package has not."""
