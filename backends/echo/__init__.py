"""A model without weights that repeats its input: a product feature and the double of tests."""
