"""Token merging alone: the settings of ``apply_token_merging(pipe, ratio=0.5)``, which suit the model."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmerge.config import Correction, MergeSharing, ToMeConfig
from tokenmerge.default_method import allows_proportional
from tokenmerge.models.base import Host
from tokenmerge.models.placement import device_of
from tokenmerge.plans import RunFacts, facts_of, share_that_merges
from tokenmerge.plans.choose import FIRST_STEP_ALONE
from tokenmerge.plans.falling import falling

# Where attention that merges has a smaller share of the operations, merging around it saves next to no time.
# On GPUs its share of the time is less than half of that: on an H200, 5 % where it has 16 % of the operations
# (Stable Diffusion 1.5 at 512 px) and 13 % where it has 27 % (at 768 px). These times are estimates from
# benchmarks/gpu_h200.jsonl.
_LEAST_SHARE = {"cpu": 0.1}
_LEAST_SHARE_ON_GPUS = 0.2
_SIDE = 64  # of latents whose size is unknown
_STEPS = 20


def settings_of_ratio(pipe_or_model: object, hosts: Sequence[Host], ratio: float) -> ToMeConfig:
    """Return the settings of token merging alone for models that were found in a pipeline or a model.

    In the pipeline of a transformer, tokens merge once for all blocks, by what the blocks added in the step
    before. The loss of merging is given back, so the first step runs on all tokens. A UNet merges around the
    self-attention of its finest level, with one plan for the level. So does a model alone, whose steps are
    unknown.
    """
    proportional = allows_proportional(pipe_or_model, hosts)
    shared = MergeSharing(blocks=True)
    if getattr(pipe_or_model, "scheduler", None) is not None and _facts(hosts).model == "transformer":
        config = ToMeConfig(
            ratio=ratio,
            scope="block",
            planner="tiled",
            features="model_residual",
            proportional=proportional,
            merge_sharing=shared,
            # With one dense step in 4, images are 2.8 dB closer, at 1.63× in place of 1.96×
            # (benchmarks/ratio_cpu.jsonl).
            correction=Correction(every=FIRST_STEP_ALONE),
        )
        return falling(config)
    return ToMeConfig(ratio=ratio, planner="tiled", proportional=proportional, merge_sharing=shared)


def little_to_gain(pipe_or_model: object, hosts: Sequence[Host], config: ToMeConfig) -> str:
    """Return a warning if merging saves next to no time at the model's default size, or an empty string."""
    if config.scope != "layers" or not config.merges:
        return ""
    share = share_that_merges(_facts(hosts), config)
    kind = device_of(pipe_or_model, _denoiser(hosts).root).type
    if share >= _LEAST_SHARE.get(kind, _LEAST_SHARE_ON_GPUS):
        return ""
    rows, columns = _facts(hosts).grid[-2:]
    return (
        f"ratio={config.ratio:g}: the attention that merges is {share:.0%} of the operations on {rows} × "
        f"{columns} tokens, so merging saves next to no time at this size; generate a larger image, or "
        "write apply_token_merging(pipe, speedup=2.0), which skips parts of the model in some steps"
    )


def _denoiser(hosts: Sequence[Host]) -> Host:
    return next((host for host in hosts if not host.controlnet), hosts[0])


def _facts(hosts: Sequence[Host]) -> RunFacts:
    denoiser = _denoiser(hosts)
    grid = denoiser.grid_at(*(denoiser.sample_size or (_SIDE, _SIDE)))
    return facts_of(denoiser, grid, _STEPS)
