"""Other programs that merging works in, each a room of its own; none imports another.

- ``comfyui``: the node for ComfyUI. ``play``: the playground in the browser. ``export``: merged denoisers as
  files for ONNX Runtime and OpenVINO.
- ``paddle``: the models of ppdiffusers, without PyTorch. It is public as :mod:`tokenmerge.paddle`. Its tensor
  functions are in ``portable``, for any array library.

They may import what their lines in ``tests/test_layering.py`` list. Only the command line and
:mod:`tokenmerge.paddle` import them.
"""
