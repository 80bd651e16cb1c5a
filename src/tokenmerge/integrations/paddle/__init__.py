"""Token merging for the UNets, ControlNets and transformers of ppdiffusers, on PaddlePaddle.

Needs the extra ``paddle`` and neither PyTorch nor diffusers::

    import tokenmerge.paddle

    tokenmerge.paddle.apply_patch(pipe, ratio=0.5)
    tokenmerge.paddle.remove_patch(pipe)

``import tokenmerge.paddle.pipeline_methods`` replaces the methods ``apply_tome`` and ``remove_tome`` of
ppdiffusers' pipelines and models.
"""

from tokenmerge.errors import MissingExtraError

try:
    import paddle
    import ppdiffusers
except ImportError as error:
    tested = "tested with paddlepaddle 3.3.1 and ppdiffusers 0.29.0"
    needed_by = f"tokenmerge.paddle, {tested}, needs {error.name or 'paddlepaddle'}"
    raise MissingExtraError("tokenmerge[paddle]", needed_by=needed_by) from error

del paddle, ppdiffusers
