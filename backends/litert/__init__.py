"""Graphs in TensorFlow Lite, computed by LiteRT on the CPU. Only `model` needs its package."""
