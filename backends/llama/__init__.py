"""GGUF models through llama.cpp, using only the low-level bindings of llama-cpp-python.

`model` has the `LanguageModel`; `loading` checks and opens files and estimates memory, `kv` owns
contexts, `sampling` sampler chains, `text` vocabularies and chat templates, `lora` adapters,
`llama_log` llama.cpp's log.

The `__init__` of the bindings imports jinja2, diskcache and multiprocessing for their high-level
API, which nothing here uses. This would take 0.05 s of each start of a worker, and 5 MB of its
memory.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

PACKAGE = "llama_cpp"


class _Package(ModuleType):
    """The package before its `__init__` has run. The first use of a name that is not one of its
    modules runs `__init__`, because other code in this process may use the high-level API.
    """

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        if name.startswith("__") or importlib.util.find_spec(f"{PACKAGE}.{name}") is not None:
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}", name=name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.exec_module(self)
        return getattr(self, name)


def prepare_bindings() -> None:
    """Let `from llama_cpp import llama_cpp` import that module alone, unless the whole package has
    been imported already.
    """
    if PACKAGE in sys.modules:
        return
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.loader is None:
        return  # the import fails, with an error of its own
    package = importlib.util.module_from_spec(spec)
    package.__class__ = _Package
    sys.modules[PACKAGE] = package


prepare_bindings()
