"""Published methods as settings: one frame for all, so that they can be compared and mixed.

Each takes a ratio and any other setting of :class:`tokenmerge.ToMeConfig`, which replaces the method's own. A
part such as ``plans=PlanSharing(every=2)`` is replaced whole; ``**{"plans.every": 2}`` replaces one field.

>>> sito(0.4, max_downsample=2).planner
'sito'
"""

from __future__ import annotations

from typing import Any

from tokenmerge.config import PlanSharing, Schedule, ToMeConfig, names

__all__ = ["ca_tome", "ibtm", "sdtm", "sito", "todo", "toma", "tomesd"]


def tomesd(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """Token Merging for Stable Diffusion: D. Bolya and J. Hoffman, arXiv 2303.17604.

    Merges around self-attention at the finest level, each token with its most similar destination of all the
    picture, planned anew in every block at every step. The same as :func:`tokenmerge.apply_patch`.

    Deviates: the destinations are drawn by a function of seed, step and cell instead of a generator, so that
    pictures do not depend on the batch and the model compiles.

    Not for SDXL as it is, which has no attention at the finest level (``max_downsample=2``), nor for small
    pictures, where planning costs as much as merging saves.
    """
    return _preset(changes, ratio=ratio, plans=PlanSharing(guidance=False))


def todo(ratio: float = 0.75, **changes: Any) -> ToMeConfig:
    """ToDo, token downsampling: E. Smith et al., arXiv 2402.13573.

    Self-attention looks at every second token of every second row, and all tokens look. Nothing is compared.

    Deviates: what is left out follows from ``sx`` and ``sy`` alone, whatever the ratio; a factor of 4 is
    ``todo(sx=4, sy=4)``. The paper has a factor for each of two levels of Stable Diffusion 1.5, which is
    ``max_downsample=2`` with ``levels``.

    Not for models that make keys and queries of one input in one call, such as joint attention of image and
    text (SD3, FLUX), which are refused; nor where most of the time goes into the MLP.
    """
    return _preset(
        changes, ratio=ratio, scope="keys", planner="uniform", combine="keep", use_rand=False, sx=2, sy=2
    )


def toma(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """ToMA, token merge with attention: arXiv 2509.10918.

    Destinations of each tile by facility location, tokens shared out over them by a softmax, merged and
    unmerged by dense products; around self-attention, cross-attention and MLP of all levels.

    Deviates: a tile has 8 × 8 tokens at any size of the picture, where the paper has 64 tiles, which is the
    same at 64 × 64 tokens. Destinations and shares are made anew together every 5 steps; the paper makes the
    destinations every 10 and the shares every 5. Grids that tiles do not divide get larger tiles. The
    authors' script for FLUX merges in every third step alone, leaves the first five joint and the first five
    single blocks dense, and merges the MLP of single blocks and not that of joint ones. Here every step and
    every block merges, and of the MLPs those of joint blocks: single ones project theirs with attention, and
    merge it with ``scope="block"`` alone.

    Not for small models on a GPU with ``plans.every=1``: destinations are chosen one after the other, by
    kernels that take longer to start than to run.
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
        plans=PlanSharing(every=5, blocks=True),
    )


def ca_tome(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """CA-ToMe, cached adaptive token merging: arXiv 2501.00946.

    :func:`tomesd` with means of those tokens alone whose similarity is 0.7 or more, and plans that are used
    for several steps.

    Deviates: the paper merges all tokens above the threshold and no other, and its speed follows the picture.
    Here the ratio says how many go, and those below the threshold are dropped instead of blended (see
    :func:`tokenmerge.planners.threshold.plan_threshold`). Plans are made every 4 steps; the paper lists 13 of
    50 steps, closer together at the end.

    Not for a speed that adapts to the picture: shapes never depend on what is in it.
    """
    return _preset(
        changes, ratio=ratio, planner="threshold", threshold=0.7, plans=PlanSharing(every=4, guidance=False)
    )


def ibtm(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """Importance-based token merging: H. Wu et al., arXiv 2411.16720.

    :func:`tomesd` with its destinations drawn from the tokens that guidance changed most in the last step,
    |ε_cond − ε_uncond|; the least important tokens merge first. Both halves of guidance share the plan.

    Deviates: the first step, of which nothing is known yet, and ControlNets merge as :func:`tomesd` does,
    as does a model whose result does not fit its tokens, with a warning. Destinations are drawn by a
    function of seed, step and token instead of a generator. The pool holds 1.4 times the tokens that stay,
    as in the paper for Stable Diffusion, on every model. On PixArt the paper has another variant, which is
    not built: a pool of 1.0 times, blocks 7 to 20 alone, attention and cross-attention, and tokens matched
    by their coordinates instead of their features; here PixArt merges as other models do, around self-
    attention.

    Not for models without classifier-free guidance: guidance-distilled ones (FLUX.1-dev) and few-step ones
    (LCM, Turbo), where it is :func:`tomesd`.
    """
    return _preset(changes, ratio=ratio, planner="importance")


def sdtm(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """SDTM, structure-then-detail token merging: H. Fang et al., arXiv 2505.11707.

    For the first 40 % of the steps, which make the structure, the most uniform 2 × 2 windows merge whole;
    then each token merges with its most similar one of all, as in :func:`tomesd`. The ratio falls in a
    straight line from 1.4 to 0.6 times ``ratio``, 0.7 to 0.3 by default.

    Deviates: merges once around each block and unmerges the change alone (``scope="block"``). Left out are
    the paper's weights for parts of the prompt, its list of blocks and steps that do not merge, and its
    rounding to multiples of 16 tokens. Plans are made at every step; the paper keeps them for some
    (``plans.every``).

    Not for ratios above 0.53 with 2 × 2 windows: the first steps would remove more than 3 of 4 tokens.
    """
    return _preset(
        changes,
        ratio=ratio,
        scope="block",
        planner="windows",
        schedule=Schedule(ratio=(1.4, 0.6), phases={0.4: {"planner": "tome"}}),
    )


def sito(ratio: float = 0.5, **changes: Any) -> ToMeConfig:
    """SiTo, similarity-based token pruning: E. Zhang et al., AAAI 2025.

    The most typical token of each cell is its base token; of the others those most similar to a base token
    are dropped, and get the result of the most similar token that stays. Around self-attention of the finest
    level.

    Deviates: how typical a token is comes from one product with the sum of all directions instead of from
    all pairs, which is the same number.

    Not for MLPs: the paper advises strongly against dropping tokens there.
    """
    return _preset(changes, ratio=ratio, planner="sito", combine="keep", plans=PlanSharing(guidance=False))


def _preset(changes: dict[str, Any], **own: Any) -> ToMeConfig:
    return ToMeConfig.from_dict({**names.flat(own), **names.flat(changes)})
