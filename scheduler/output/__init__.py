"""From logits to a turn's text and its end."""
