"""Importing this module replaces ppdiffusers' ``apply_tome`` and ``remove_tome`` on pipelines and models.

Opt-in, because it changes classes of another library::

    import tokenmerge.paddle.pipeline_methods

    pipe.apply_tome(ratio=0.5)
    pipe.remove_tome()
"""

from __future__ import annotations

from paddle import nn
from ppdiffusers import DiffusionPipeline

from tokenmerge.integrations.paddle.api import apply_tome, remove_tome

__all__: list[str] = []

for _class in (DiffusionPipeline, nn.Layer):
    _class.apply_tome = apply_tome
    _class.remove_tome = remove_tome
