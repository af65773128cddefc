"""`make compare`: inferd and llama-server give the same greedy text, or it is known why not."""
