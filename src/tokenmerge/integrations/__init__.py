"""Integrations with other programs, one folder each. Only ``paddle`` imports another one: ``portable.py``.

- ``comfyui``: the node for ComfyUI.
- ``export``: the arithmetic of exported programs, for ONNX Runtime and OpenVINO.
- ``paddle``: the models of ppdiffusers, without PyTorch. It is public as :mod:`tokenmerge.paddle`. Its tensor
  functions are in ``portable.py``, for any array library.
- ``serving``: plug-ins for vLLM-Omni and SGLang, which find them by entry points.

``tests/test_layering.py`` lists what each of them may import, and who imports them.
"""
