"""The llama.cpp version of the pinned engine, available without loading the library."""

from __future__ import annotations

LLAMA_COMMIT = "0c1e57098"
"""ggml-org/llama.cpp as vendored by llama-cpp-python 0.3.36; the library does not report it."""

LLAMA_BUILD_NUMBER = 0
"""The number of commits in llama.cpp's repository; 0 (unknown), as the source package has none."""
