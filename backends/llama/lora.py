"""The adapters of one model: checking, loading, selecting and freeing them."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from llama_cpp import llama_cpp as lib

from ..adapter_keys import AdapterInfo, AdapterSpec, split_key
from ..errors import InvalidArgument, LoadFailed
from .llama_log import capture
from .loading.adapter_check import check_adapter, check_numbers, hash_of
from .loading.gguf_check import GgufFile, open_model_file, read_gguf
from .loading.opening import c_file


class LlamaAdapters:
    """The loaded and selected adapters. Owned by the model's thread; *file* is the model's own."""

    def __init__(self, model: Any, context: Any, file: GgufFile):
        self._model, self._context, self._file = model, context, file
        self._loaded: dict[str, tuple[Any, AdapterInfo]] = {}
        """By id, llama.cpp's pointer and the description."""
        self._chosen: tuple[str, ...] = ()
        self._applied: tuple[str, ...] = ()

    def add(self, spec: AdapterSpec) -> AdapterInfo:
        """Load an adapter; see `LanguageModel.add_adapter`."""
        name = os.path.basename(spec.path)
        with open_model_file(spec.path) as fd:
            file = read_gguf(fd, name)
            check_adapter(file, self._file, name)
            adapter_id = hash_of(fd)
            if adapter_id not in self._loaded:
                check_numbers(fd, file, name)
                size = sum(tensor.size for tensor in file.tensors.values())
                info = AdapterInfo(id=adapter_id, size_bytes=size)
                self._loaded[adapter_id] = self._load(fd, name), info
        return self._loaded[adapter_id][1]

    def _load(self, fd: int, name: str) -> Any:
        log = capture()
        log.clear()
        with c_file(fd, name) as stream:
            pointer = lib.llama_adapter_lora_init_from_file_ptr(self._model, stream)
        if not pointer:
            raise LoadFailed(
                f"llama.cpp cannot load the adapter {name!r}: {log.cause()}",
                hint="was it made for this model, and is there memory for it?",
            )
        return pointer

    def remove(self, adapter_id: str) -> None:
        """Unload an adapter; see `LanguageModel.remove_adapter`."""
        assert adapter_id not in {split_key(key)[0] for key in self._chosen}, "it is in use"
        self.apply()  # the context may still point to it
        lib.llama_adapter_lora_free(self._loaded.pop(adapter_id)[0])

    def choose(self, keys: tuple[str, ...]) -> None:
        """Select the adapters of the next steps; see `LanguageModel.set_adapters`."""
        missing = next((i for i, _ in map(split_key, keys) if i not in self._loaded), None)
        if missing is not None:
            raise InvalidArgument(
                f"the model has no adapter {missing!r}",
                hint="it was removed or its file has changed: `inferd show` lists the adapters",
            )
        self._chosen = keys

    def apply(self) -> None:
        """If the selection has changed, set it in the context, which then rebuilds its graphs."""
        if self._chosen == self._applied:
            return
        pairs = [split_key(key) for key in self._chosen]
        pointers = [self._loaded[adapter_id][0] for adapter_id, _ in pairs]
        lib.llama_set_adapters_lora(
            self._context,
            (lib.llama_adapter_lora_p_ctypes * len(pairs))(*pointers),
            len(pairs),
            (ctypes.c_float * len(pairs))(*(scale for _, scale in pairs)),
        )
        self._applied = self._chosen

    def close(self) -> None:
        """Forget all adapters, which llama.cpp frees with their model."""
        self._loaded.clear()
        self._chosen = self._applied = ()
