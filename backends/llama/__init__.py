"""GGUF models through llama.cpp, using only the low-level bindings of llama-cpp-python.

`model` has the `Model`; `loading` checks and opens files and estimates memory, `kv` owns contexts,
`sampling` sampler chains, `text` vocabularies and chat templates, `lora` adapters, `llama_log`
llama.cpp's log.
"""

from .bindings import prepare_bindings

prepare_bindings()
