"""Graphs in ONNX, computed by ONNX Runtime on the CPU. Only `model` needs its package."""
