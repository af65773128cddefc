"""Graphs in OpenVINO's format, in ONNX and in SavedModel folders of TensorFlow, computed by
OpenVINO. Only `model` needs its package.
"""
