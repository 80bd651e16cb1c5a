"""Exports merged denoisers for programs that run without PyTorch: ONNX Runtime and OpenVINO.

It finds, loads and calls pipelines by functions of :mod:`tokenmerge_tools.pipelines`.
"""

from tokenmerge_tools.export.run import export_denoiser

__all__ = ["export_denoiser"]
