"""Loading of GGUF files: checks, memory estimates, devices, and the load itself."""
