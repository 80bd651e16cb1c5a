"""Write a trained model as the folder that users load, in half precision.

python -m tools.training.export emoji-unet tools/src/tokenmerge_tools/demo/emoji-unet
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from tools.training.codec import load_codec
from tools.training.train import load_trained
from transformers import CLIPTokenizer


def edit_config(path: Path, **entries: str | None) -> None:
    """Set entries of a configuration file; None removes one."""
    config = json.loads(path.read_text()) | entries
    kept = {key: value for key, value in config.items() if value is not None or key not in entries}
    path.write_text(json.dumps(kept, indent=2) + "\n")


def main(
    name: Annotated[str, typer.Argument(help="Name of the model.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it.")],
    average: Annotated[bool, typer.Option(help="Averaged weights, or the last ones.")] = True,
) -> None:
    """Write the model of the last checkpoint, with the codec, as a diffusers folder."""
    cpu = torch.device("cpu")
    model = load_trained(name, cpu, average)
    pipe = model.pipeline(load_codec(cpu)).to(torch.float16)
    pipe.save_pretrained(folder)
    # transformers 5 would load the text encoder in the precision of its file, diffusers everything else in
    # float32: the two must agree. AutoencoderTiny derives the other entry, and warns if it is given.
    for encoder in folder.glob("text_encoder*"):
        edit_config(encoder / "config.json", dtype="float32")
    edit_config(folder / "vae" / "config.json", block_out_channels=None, _name_or_path=None)
    # transformers 4 reads these two files and not tokenizer.json.
    for part, tokenizer in pipe.components.items():
        if isinstance(tokenizer, CLIPTokenizer):
            tokenizer.backend_tokenizer.model.save(str(folder / part))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    typer.echo(f"{folder}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    typer.run(main)
