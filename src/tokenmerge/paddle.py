"""Token merging for the models of ppdiffusers; the public name of :mod:`tokenmerge.integrations.paddle`."""

from tokenmerge.integrations import paddle as _paddle
from tokenmerge.integrations.paddle.api import *  # noqa: F403
from tokenmerge.integrations.paddle.api import __all__ as __all__

__path__ = _paddle.__path__  # where ``import tokenmerge.paddle.pipeline_methods`` finds its module
