"""Rivals from the formulas of their papers, where no installed library has them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from tokenmerge_tools.variants.generation import (
    Generation,
    about,
    in_each_call,
    sample_of,
    transformer_blocks,
)

_TOKENS = "hidden_states"
# The values that one pass of guidance keeps from step to step.
_State = dict[str, Any]
# The constants of the papers and of the authors' code. Steps are fractions of the generation.
_EASY_FIRST = 0.15
_EASY_LAST = 0.95
_MOST_GAMMA = 1.5
_LEAST_CHANGE = 1e-12  # this keeps the quotient finite
_SADA_FIRST = 0.2
_SADA_LAST = 0.94


def easycache(pipe: Any, config: None, threshold: float) -> contextlib.AbstractContextManager[None]:
    """Skip the whole denoiser while its estimated change since the last full step is small.

    The change is Σ k·|x - x₀| / |v₀|, with x₀ and v₀ the sample and the output of the last full step, and
    k the ratio of their changes between the last two full steps. A skipped step returns x + (v₀ - x₀). As
    in ComfyUI, the first 15 % and the last 5 % of the steps are full; differences are over all positions.
    Source: arXiv 2507.02860.
    """

    @contextlib.contextmanager
    def begin(now: Generation) -> Iterator[None]:
        known: dict[int, _State] = defaultdict(dict)
        skips = False

        def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal skips
            x = sample_of(args, kwargs)
            state = known[now.turn]
            moved = _size(x - state["x"]) if "x" in state else None
            if now.turn == 0:  # the other passes of guidance follow the first one
                skips = False
                done = now.index / now.steps
                if "rate" in state and _EASY_FIRST <= done <= _EASY_LAST:
                    state["change"] += state["rate"] * moved / state["size"]
                    skips = state["change"] < threshold
            if skips and "difference" in state:
                return _like(state["output"], x + state["difference"])
            output = forward(*args, **kwargs)
            state["output"] = output
            v = _first(output)
            if v.shape != x.shape:
                now.refuse(
                    f"needs an output of the shape of the sample, {list(x.shape)}, got {list(v.shape)}"
                )
            if moved:
                state["rate"] = _size(v - state["v"]) / moved
            state |= {"x": x, "v": v, "difference": v - x, "size": _size(v), "change": 0.0}
            return output

        _replace_forward(now.model, run)
        yield

    return in_each_call("easycache", pipe, begin)


def dicache(pipe: Any, config: None, threshold: float) -> contextlib.AbstractContextManager[None]:
    """Skip all blocks but the first while its output changes as much as its input does.

    The change is Σ |δp - δx| over steps, with δ the relative change since the step before, p the output of
    the first block and x its input. The residual of all blocks is R₂ + γ(R₁ - R₂) of the last two full
    steps, with γ = |r - r₂| / |r₁ - r₂| from 1 to 1.5, and r the residual of the first block. The first and
    the last step are full. Source: arXiv 2508.17356, with one block as its probe.
    """

    @contextlib.contextmanager
    def begin(now: Generation) -> Iterator[None]:
        first, *others = transformer_blocks(now)
        known: dict[int, _State] = defaultdict(lambda: {"change": 0.0, "full": []})

        def probe(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            state = known[now.turn]
            x = _inputs(first, args, kwargs)[0]
            output = forward(*args, **kwargs)
            p, text = _outputs(first, output)
            skips = False
            done = state["full"]
            if done and now.index < now.steps - 1:
                change_of_x = _size(x - state["x"]) / _size(state["x"])
                change_of_p = _size(p - state["p"]) / _size(state["p"])
                state["change"] += abs(change_of_p - change_of_x)
                skips = state["change"] < threshold
            state |= {"x": x, "p": p, "skips": skips}
            if not skips:
                state["change"] = 0.0
                return output
            residual, _ = done[-1]
            if len(done) > 1:
                (before, r2), (_, r1) = done
                gamma = _size(p - x - r2) / max(_size(r1 - r2), _LEAST_CHANGE)
                residual = before + min(max(gamma, 1.0), _MOST_GAMMA) * (residual - before)
            return _returned(first, x + residual, text)

        def follow(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            state = known[now.turn]
            if state["skips"]:
                return _returned(block, *_inputs(block, args, kwargs))
            output = forward(*args, **kwargs)
            if block is others[-1]:
                residuals = _outputs(block, output)[0] - state["x"], state["p"] - state["x"]
                state["full"].append(residuals)
                del state["full"][:-2]
            return output

        _replace_forward(first, probe)
        for block in others:
            _replace_forward(block, partial(follow, block))
        yield

    return in_each_call("dicache", pipe, begin, transformer_blocks)


def sada(pipe: Any, config: None) -> contextlib.AbstractContextManager[None]:
    """Skip four steps if the mean second difference of the last three velocities is not negative.

    The first of them extrapolates linearly, the others repeat the last computed velocity. Steps are skipped
    from 20 % to 94 % of the generation. It has no threshold. This is the rule of the authors' code for flow
    matching with Euler's method, without their pruning of tokens and Lagrange interpolation. Source: ICML
    2025, github.com/Ting-Justin-Jiang/sada-icml.
    """

    @contextlib.contextmanager
    def begin(now: Generation) -> Iterator[None]:
        known: dict[int, list[Any]] = defaultdict(list)  # outputs of each pass, newest last
        in_row = 0

        def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal in_row
            outputs = known[now.turn]
            if now.turn == 0:
                done = (now.index - 1) / now.steps
                may = len(outputs) == 3 and _SADA_FIRST <= done < _SADA_LAST
                stable = may and not in_row and _is_stable(*map(_first, outputs))
                in_row = in_row + 1 if may and (stable or 0 < in_row < 4) else 0
            if in_row and len(outputs) == 3:
                output = outputs[-1]
                if in_row == 1:
                    output = _like(output, 2 * _first(output) - _first(outputs[-2]))
                outputs.append(outputs[-1])
            else:
                output = forward(*args, **kwargs)
                outputs.append(output)
            del outputs[:-3]
            return output

        _replace_forward(now.model, run)
        yield

    def check(now: Generation) -> None:
        scheduler = type(now.pipe.scheduler).__name__
        if scheduler != "FlowMatchEulerDiscreteScheduler":
            now.refuse(f"is here for flow matching with Euler's method, not for {scheduler}")

    return in_each_call("sada", pipe, begin, check)


def _is_stable(before: Tensor, last: Tensor, now: Tensor) -> bool:
    return float((now - 2 * last + before).mean()) >= 0


def _inputs(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    """Return the tokens of the image and of the text among the arguments of a block."""
    known = about(block)
    found = known._get_parameter_from_args_kwargs
    name = getattr(known, "hidden_states_argument_name", _TOKENS)
    has_text = known.return_encoder_hidden_states_index is not None
    return found(name, args, kwargs), found(f"encoder_{_TOKENS}", args, kwargs) if has_text else None


def _returned(block: nn.Module, sample: Tensor, text: Any) -> Any:
    """Return what a block returns for these tokens of the image and of the text."""
    place = about(block).return_encoder_hidden_states_index
    if place is None:
        return sample
    return (text, sample) if place == 0 else (sample, text)


def _outputs(block: nn.Module, output: Any) -> tuple[Tensor, Any]:
    """Undo :func:`_returned`."""
    found: tuple[Tensor, Any] = output if isinstance(output, tuple) else (output, None)
    return found[::-1] if about(block).return_encoder_hidden_states_index == 0 else found


def _replace_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: run(forward, *args, **kwargs)


def _size(difference: Tensor) -> float:
    return float(difference.abs().mean())


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output.sample
    return found


def _like(output: Any, sample: Tensor) -> Any:
    return (sample,) if isinstance(output, tuple) else type(output)(sample=sample)
