"""Importing this module gives diffusers' pipelines and models the methods ``apply_tome`` and ``remove_tome``.

Opt-in, because it adds to classes of another library::

    import tokenmerge.pipeline_methods

    pipe.apply_tome(ratio=0.5)
    pipe.remove_tome()
"""

from __future__ import annotations

from tokenmerge.compat import apply_tome, remove_patch
from tokenmerge.errors import MissingExtraError

try:
    from diffusers import DiffusionPipeline, ModelMixin
except ImportError as error:
    raise MissingExtraError("diffusers", needed_by="tokenmerge.pipeline_methods needs diffusers") from error

__all__: list[str] = []

for _class in (DiffusionPipeline, ModelMixin):
    _class.apply_tome = apply_tome
    _class.remove_tome = remove_patch
