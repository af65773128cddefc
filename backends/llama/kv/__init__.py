"""llama.cpp contexts and the KV state in them."""
