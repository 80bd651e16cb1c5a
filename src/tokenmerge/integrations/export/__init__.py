"""Exports merged denoisers for programs that run without PyTorch: ONNX Runtime and OpenVINO.

It is a room of its own beside :mod:`tokenmerge.measure`, because it measures nothing. It takes from there how
pipelines are found, loaded and called.
"""

from tokenmerge.integrations.export.run import export_denoiser

__all__ = ["export_denoiser"]
