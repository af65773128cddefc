"""Sampler chains, and probabilities read from logits."""
