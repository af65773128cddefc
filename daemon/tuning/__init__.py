"""`inferd tune`: the measurement of a model's settings, and the choice between them."""
