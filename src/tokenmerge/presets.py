"""Published methods as settings, so that they can be compared and mixed.

Each function takes a ratio, and any other setting of :class:`tokenmerge.ToMeConfig` to replace its own value.
A part such as ``merge_sharing=MergeSharing(every=2)`` is replaced as a whole, a field by
``**{"merge_sharing.every": 2}``.

>>> sito(0.4, max_downsample=2).planner
'sito'
"""

from __future__ import annotations

from typing import Any

from tokenmerge.config import MergeSharing, ToMeConfig, checks, parts

__all__ = ["ca_tome", "ibtm", "sdtm", "sito", "todo", "toma", "tomesd"]

_PARTS = 5  # of the steps, each of which has a ratio of its own in sdtm


def tomesd(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """Token Merging for Stable Diffusion: D. Bolya and J. Hoffman, arXiv 2303.17604.

    Merges around self-attention at the finest level, as :func:`tokenmerge.apply_patch` does. Each token
    merges with the most similar destination of the image, with a new plan in every block at every step.

    Deviates: destinations are drawn by a function of seed, step and cell instead of a generator, so that
    images do not depend on the batch and the model compiles.

    Not for small images, where planning takes as much time as merging saves.
    """
    return _preset(changes, ratio=ratio, merge_sharing=MergeSharing(guidance=False))


def todo(ratio: float = 0.75, **changes: Any) -> ToMeConfig:
    """ToDo, token downsampling: E. Smith et al., arXiv 2402.13573.

    Self-attention takes its keys and values from every second token in every second row, and its queries from
    all tokens. No tokens are compared.

    Deviates: ``sx`` and ``sy`` alone set the number of tokens left out, whatever the ratio; a factor of 4 is
    ``todo(sx=4, sy=4)``. The paper has different factors for two levels of Stable Diffusion 1.5; set these by
    ``max_downsample=2`` and ``rules=[{"level": 2, "sx": 2, "sy": 1}]``.

    Not for models that compute queries and keys from one argument, such as joint attention of image and text
    (SD3, FLUX): they raise an error. Nor for models that spend most of their time in the MLP.
    """
    return _preset(
        changes, ratio=ratio, scope="keys", planner="uniform", combine="keep", seed=None, sx=2, sy=2
    )


def toma(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """ToMA, token merge with attention: arXiv 2509.10918.

    Destinations of each tile are chosen by facility location, and a softmax distributes the tokens over them.
    Dense products merge and unmerge tokens, around self-attention, cross-attention and MLP at all levels.

    Deviates: a tile has 8 × 8 tokens for every image size. The paper has 64 tiles, which is the same at
    64 × 64 tokens. Grids that tiles do not divide get larger tiles. Destinations and shares are computed
    together every 5 steps; the paper computes destinations every 10 steps and shares every 5. The
    authors' script for FLUX merges only in every third step, leaves the first five joint and the first
    five single blocks dense, and merges the MLP of single blocks but not that of joint blocks. Here all
    blocks merge in all steps, and joint blocks merge their MLPs. Single blocks project their MLP together
    with attention, so it merges only with ``scope="block"``.

    Not for small models on a GPU with ``merge_sharing.every=1``: destinations are chosen one after the
    other, by kernels that take longer to launch than to run.
    """
    return _preset(
        changes,
        ratio=ratio,
        max_downsample=8,
        planner="toma",
        sx=8,
        sy=8,
        merge_crossattn=True,
        merge_mlp=True,
        merge_sharing=MergeSharing(every=5, blocks=True),
    )


def ca_tome(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """CA-ToMe, cached adaptive token merging: arXiv 2501.00946.

    Like :func:`tomesd`, but only tokens with a similarity ≥ 0.7 count in means, and plans last several steps.

    Deviates: the paper merges exactly the tokens above the threshold, so its speed depends on the image.
    Here the ratio sets how many tokens are removed, and those below the threshold are dropped instead of
    averaged (see :func:`tokenmerge.planners.threshold.plan_threshold`). Plans are made every 4 steps; the
    paper lists 13 of 50 steps, closer together at the end.

    The speed does not adapt to the image: shapes never depend on the content.
    """
    return _preset(
        changes,
        ratio=ratio,
        planner="threshold",
        threshold=0.7,
        merge_sharing=MergeSharing(every=4, guidance=False),
    )


def ibtm(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """Importance-based token merging: H. Wu et al., arXiv 2411.16720.

    Like :func:`tomesd`, but destinations are drawn from the tokens that guidance changed most in the last
    step, by |ε_cond − ε_uncond|. The least important tokens merge first. Halves of guidance share the plan.

    Deviates: the first step, for which nothing is known yet, and ControlNets merge as in :func:`tomesd`. So
    does a model whose result does not fit its tokens; this gives a warning. Destinations are drawn by a
    function of seed, step and token instead of a generator. The pool holds 1.4 times the tokens that stay, as
    in the paper for Stable Diffusion, on every model. The paper's variant for PixArt is not implemented: a
    pool of 1.0 times the tokens that stay, only blocks 7 to 20, attention and cross-attention, and tokens
    matched by coordinates instead of features. Here PixArt merges around self-attention, like other models.

    Not for models without classifier-free guidance: guidance-distilled ones (FLUX.1-dev) and few-step ones
    (LCM, Turbo), where it is the same as :func:`tomesd`.
    """
    return _preset(changes, ratio=ratio, planner="importance")


def sdtm(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """SDTM, structure-then-detail token merging: H. Fang et al., arXiv 2505.11707.

    In the first 40 % of the steps, which make the structure, the most uniform 2 × 2 windows merge as a
    whole. After that, each token merges with its most similar destination, as in :func:`tomesd`. The
    ratio falls from 1.32 to 0.68 times ``ratio``, by default from 0.66 to 0.34.

    Deviates: the paper's ratio falls linearly, and this one in five parts of the steps, each of which has the
    mean of its part of a line from 1.4 to 0.6 times ``ratio``. Merges once around each block and unmerges
    only the change (``scope="block"``). The paper's weights for parts of the prompt, its list of dense blocks
    and steps, and its rounding to multiples of 16 tokens are left out. Plans are made at every step; the
    paper keeps them for several (``merge_sharing.every``).

    Not for ratios above 0.56 with 2 × 2 windows: the first steps would remove more than 3 of 4 tokens.
    """
    mean = checks.as_number(ratio) or 0.0  # a value that is no number is refused below
    rules: list[dict[str, Any]] = []
    for part in range(_PARTS):
        # This is the mean of a part of the line from 1.4 to 0.6.
        share = 1.32 - 0.16 * part
        rules.append({"start": part / _PARTS, "ratio": round(share * mean, 4)})
    rules.append({"start": 0.4, "planner": "tome"})
    return _preset(changes, ratio=ratio, scope="block", planner="windows", rules=rules)


def sito(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """SiTo, similarity-based token pruning: E. Zhang et al., AAAI 2025.

    The base token of each cell is the one most similar to all tokens. The other tokens that are most similar
    to a base token are dropped, and get the result of the most similar token that stays. SiTo merges around
    self-attention at the finest level.

    Deviates: the similarity of a token to all others is computed as one product with the sum of all
    directions, which is the same number as the sum over all pairs.

    Not for MLPs: the paper advises strongly against dropping tokens there.
    """
    return _preset(
        changes, ratio=ratio, planner="sito", combine="keep", merge_sharing=MergeSharing(guidance=False)
    )


def _preset(changes: dict[str, Any], **defaults: Any) -> ToMeConfig:
    return ToMeConfig.from_dict({**parts.flat(defaults), **parts.flat(changes)})
