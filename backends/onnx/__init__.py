"""Graphs in ONNX, computed by ONNX Runtime. Only `model` needs its package."""
