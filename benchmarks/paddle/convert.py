"""Convert the bundled model `emoji-unet` to a pipeline of ppdiffusers.

Run in an environment with the extra `paddle` (`make test-paddle` builds one)::

    python benchmarks/paddle/convert.py outputs/emoji-unet-paddle

`tests/integrations/paddle/test_emoji.py` compares what it computes with the PyTorch pipeline.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from ppdiffusers import (
    AutoencoderTiny,
    DPMSolverMultistepScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from ppdiffusers.transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
from safetensors.numpy import load_file

SOURCE = Path(__file__).parents[2] / "tools" / "src" / "tokenmerge_tools" / "demo" / "emoji-unet"


def pipeline(source: Path = SOURCE) -> StableDiffusionPipeline:
    """Return the pipeline of ppdiffusers with the weights of the one of diffusers in ``source``."""
    scheduler = _config(source / "scheduler" / "scheduler_config.json", DPMSolverMultistepScheduler)
    pipe = StableDiffusionPipeline(
        vae=_model(AutoencoderTiny, source / "vae"),
        text_encoder=_text_encoder(source / "text_encoder"),
        tokenizer=_tokenizer(source),
        unet=_model(UNet2DConditionModel, source / "unet"),
        scheduler=DPMSolverMultistepScheduler(**{**scheduler, "trained_betas": _betas(scheduler)}),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _model(cls: Any, folder: Path) -> nn.Layer:
    model = cls(**_config(folder / "config.json", cls))
    return _filled(model, load_file(folder / "diffusion_pytorch_model.safetensors"))


def _text_encoder(folder: Path) -> nn.Layer:
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = CLIPTextModel(CLIPTextConfig(**settings))
    weights = load_file(folder / "model.safetensors")
    return _filled(
        model, {f"text_model.{name.removeprefix('text_model.')}": w for name, w in weights.items()}
    )


def _tokenizer(source: Path) -> CLIPTokenizer:
    settings = json.loads((source / "tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8"))
    return CLIPTokenizer(
        vocab_file=str(source / "tokenizer" / "vocab.json"),
        merges_file=str(source / "tokenizer" / "merges.txt"),
        max_len=settings["model_max_length"],
        model_max_length=settings["model_max_length"],
        **{name: settings[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
    )


def _config(file: Path, cls: Any) -> dict[str, Any]:
    """Return settings in a file that the class of ppdiffusers has too."""
    known = cls._get_init_keys(cls)
    settings = json.loads(file.read_text(encoding="utf-8"))
    return {name: value for name, value in settings.items() if name in known}


def _filled(model: nn.Layer, weights: dict[str, np.ndarray]) -> nn.Layer:
    """Return the model with these weights: Paddle's linear layers keep theirs transposed.

    Raises:
        ValueError: the names or shapes of the weights are not those of the model.
    """
    linear = {f"{name}.weight" for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: value.T if name in linear else value for name, value in weights.items()}
    found = {name: value for name, value in found.items() if name in wanted or "position_ids" not in name}
    if other := {
        name for name in wanted.keys() | found.keys() if wanted.get(name) != np.shape(found.get(name))
    }:
        raise ValueError(f"{type(model).__name__}: weights that do not fit: {', '.join(sorted(other))}")
    # Half precision in the files, single precision in the model.
    model.set_state_dict({name: paddle.to_tensor(value.astype(np.float32)) for name, value in found.items()})
    model.eval()
    return model


def _betas(scheduler: dict[str, Any]) -> list[float]:
    """Return the schedule with no signal in its last step, which ppdiffusers' DPM-Solver has no setting for.

    As in arXiv 2305.08891, algorithm 1; the last product of alphas is 2⁻²⁴ instead of 0, as in diffusers.
    """
    steps = scheduler["num_train_timesteps"]
    betas = np.linspace(scheduler["beta_start"] ** 0.5, scheduler["beta_end"] ** 0.5, steps) ** 2
    root = np.sqrt(np.cumprod(1 - betas))
    root = (root - root[-1]) * root[0] / (root[0] - root[-1])
    products = np.maximum(root**2, 2.0**-24)
    return list(1 - products / np.concatenate([[1.0], products[:-1]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to save the pipeline")
    folder = parser.parse_args().folder
    pipeline().save_pretrained(str(folder))
    print(f"saved {folder}")


if __name__ == "__main__":
    main()
