"""The engine: commands in, steps of the model, reports out."""
