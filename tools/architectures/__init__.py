"""The tiny models of `make archs`, their checks and the page docs/architectures.md."""
