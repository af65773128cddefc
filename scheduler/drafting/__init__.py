"""Drafters: they propose the tokens that a stream is expected to generate next."""
