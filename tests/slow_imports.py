"""Packages that are loaded when a test uses them, not when its file is imported.

Each process of pytest imports all test files, and these packages, which few of them use, have more
modules than all others together.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

__all__ = ("NAMES", "import_when_used", "loaded")

NAMES = ("anthropic", "openai", "pydantic_ai", "schemathesis")


class _UnloadedPackage(ModuleType):
    """A package that is loaded when one of its public attributes is used.

    `importlib.util.LazyLoader` would load it when pytest asks each name of a file for its class.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            # Python would import the module a second time if the package imports it, too.
            raise ImportError(f"import modules of {self.__name__!r} after `loaded`")
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(loaded(self.__name__), name)


def import_when_used() -> None:
    """Let `import` of one of `NAMES` return a package that is not loaded yet."""
    for name in NAMES:
        spec = importlib.util.find_spec(name)
        if spec is not None and name not in sys.modules:
            package = importlib.util.module_from_spec(spec)
            del package.__path__
            package.__class__ = _UnloadedPackage
            sys.modules[name] = package


def loaded(name: str) -> ModuleType:
    """Return a package; one of `NAMES` is loaded with the others that it uses."""
    if name == "pydantic_ai":
        loaded("openai")
    package = importlib.import_module(name)
    spec = package.__spec__
    if type(package) is _UnloadedPackage and spec is not None and spec.loader is not None:
        package.__class__ = ModuleType  # type: ignore[assignment]  # mypy takes it for narrower
        package.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(package)
    return package
