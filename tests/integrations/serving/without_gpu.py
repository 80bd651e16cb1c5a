"""Makes the servers' code importable where there is no GPU: what needs one is answered by empty classes."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types

from transformers.utils import import_utils

# Each name stands for a module and all below it.
EMPTY = (
    "torchvision",  # its builds are for CUDA, and the adapters convert no image with it here
    "imageio_ffmpeg",  # a program for writing videos
    # vLLM's wheel has 0.5 GB of kernels for CUDA. The parts of vLLM-Omni below extend vLLM's classes, and the
    # adapter of diffusers needs none of them.
    "vllm",
    "vllm_omni.config",
    "vllm_omni.model_executor",
    "vllm_omni.patch",
    "vllm_omni.quantization",
    "vllm_omni.transformers_utils",
    # Kernels, and the layers and loaders of models that SGLang runs without diffusers.
    "triton",
    "tvm_ffi",
    "sglang.multimodal_gen.runtime.layers",
    "sglang.multimodal_gen.runtime.loader",
    "sglang.multimodal_gen.runtime.vla",
    "sglang.srt.layers",
    "sglang.srt.model_loader",
)


class _EmptyType(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty

    def __or__(cls, other):
        return cls

    def __ror__(cls, other):
        return cls

    def __getitem__(cls, item):
        return cls

    def __iter__(cls):
        return iter(())


class Empty(metaclass=_EmptyType):
    """Stands for any class, function or decorator."""

    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        pass

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty()

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else self


class _EmptyModules:
    def find_spec(self, name, path=None, target=None):
        if any(name == empty or name.startswith(f"{empty}.") for empty in EMPTY):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _member
        return module

    def exec_module(self, module):
        pass


def _member(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Empty,), {})


def use():
    """Make both servers' code importable. A second call does nothing."""
    if any(isinstance(finder, _EmptyModules) for finder in sys.meta_path):
        return
    import_utils.is_torchvision_available()  # asked once, and remembered
    os.environ["SGLANG_DIFFUSION_TARGET_DEVICE"] = "cpu"
    sys.meta_path.insert(0, _EmptyModules())
    import vllm
    import vllm.config.utils
    import vllm.envs
    import vllm.utils.network_utils

    vllm.__version__, vllm.__version_tuple__ = "0.30.0", (0, 30, 0)
    vllm.envs.VLLM_PLUGINS = None  # all plug-ins are loaded
    vllm.config.utils.config = lambda cls: cls
    vllm.utils.network_utils.get_open_port = lambda: 29500
    import logging

    import vllm.logger

    vllm.logger.init_logger = logging.getLogger
