"""The file of an image has its parameters, in the form that web UIs write."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tokenmerge import ToMeConfig
from tokenmerge.config import read_metadata, to_metadata
from tokenmerge_tools.cli import main
from tokenmerge_tools.generate.parameters import write_picture
from tokenmerge_tools.pipelines.options import GenerateOptions

# A command line cannot contain a null character, and lines in a PNG file end with "\n".
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"))
CONFIGS = st.none() | st.builds(ToMeConfig, ratio=st.floats(0, 0.75), seed=st.integers(0, 99))


@pytest.fixture(scope="module")
def picture(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("parameters") / "picture.png"


def text_of(path: Path) -> str:
    return Image.open(path).text["parameters"]


@given(TEXT.filter(str.strip), TEXT.filter(lambda name: not name.startswith("pickle:")), CONFIGS)
def test_the_last_line_has_every_value_and_the_settings(picture, prompt, scheduler, config):
    options = GenerateOptions(prompt=prompt, size=(48, 32), steps=3, guidance=2.5, scheduler=scheduler)
    metadata = None if config is None else to_metadata(config, "auto")
    write_picture(Image.new("RGB", (1, 1)), options, 7, metadata, picture)
    first, _, last = text_of(picture).rpartition("\n")
    assert first == prompt
    # As AUTOMATIC1111 reads it: a name, a colon, and a value up to a comma or in quotes.
    found = dict(re.findall(r'(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)', last))
    read = {
        name: json.loads(value) if value.startswith('"') else value.strip() for name, value in found.items()
    }
    assert {name: read[name] for name in ("Steps", "CFG scale", "Seed", "Size", "Model")} == {
        "Steps": "3",
        "CFG scale": "2.5",
        "Seed": "7",
        "Size": "48x32",
        "Model": "emoji-unet",
    }
    assert read["Sampler"] == scheduler
    assert config is None or read_metadata(last) == config


def test_a_file_is_named_without_its_folders(folder, tmp_path):
    options = ("--steps", "2", "--size", "32x48", "--negative-prompt", "blue", "--method", "tome")
    arguments = ["generate", "a red, apple", "--model", folder, "--out", tmp_path, "--repeat", 1, *options]
    assert main([*map(str, arguments)]) == 0
    for name in ("dense", "tokenmerge"):
        text = text_of(tmp_path / f"{name}-00.png")
        assert text.startswith("a red, apple\nNegative prompt: blue\nSteps: 2, Seed: 0, Size: 32x48, Model: ")
        assert f"Model: {folder.name}" in text
        assert str(folder.parent) not in text
        assert ("Token merging" in text) == (name == "tokenmerge")
