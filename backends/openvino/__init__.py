"""Graphs in OpenVINO's format, in ONNX and in SavedModel folders of TensorFlow, computed by
OpenVINO on the CPU. Only `model` needs its package.
"""
