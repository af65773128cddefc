"""llama.cpp contexts and their KV states."""
