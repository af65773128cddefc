"""`make compare`: whether both sides give the same greedy text, with each difference explained."""
