"""The file of a picture has its parameters, in the form that web UIs read."""

import json
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tokenmerge import ToMeConfig
from tokenmerge.config import read_metadata, to_metadata
from tokenmerge_tools.generate.parameters import parameters_of, write_picture
from tokenmerge_tools.pipelines.options import GenerateOptions

# An entry as AUTOMATIC1111 reads it: a name, a colon, and JSON in quotes or the text before the next comma.
ENTRY = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r/\\~"), min_size=1)


def entries(text: str) -> dict[str, str]:
    found = dict(ENTRY.findall(text.rpartition("\n")[2]))
    return {name: json.loads(value) if value[:1] == '"' else value.strip() for name, value in found.items()}


@given(
    prompt=NAME.filter(str.strip),
    negative=st.none() | NAME,
    guidance=st.none() | st.floats(0, 100),
    scheduler=st.none() | NAME,
    merging=st.none() | st.builds(ToMeConfig, ratio=st.floats(0, 0.75), seed=st.integers(0, 99)),
)
def test_parameters_are_read_as_they_were_written(prompt, negative, guidance, scheduler, merging):
    options = GenerateOptions(
        prompt=prompt, negative_prompt=negative, guidance=guidance, scheduler=scheduler, steps=7
    )
    metadata = None if merging is None else to_metadata(merging, "auto")
    text = parameters_of(options, (512, 768), 5, metadata)
    assert text.startswith(prompt + "\n" + ("" if negative is None else f"Negative prompt: {negative}\n"))
    found = entries(text)
    assert (found["Steps"], found["Seed"], found["Size"], found["Model"]) == (
        "7",
        "5",
        "512x768",
        "emoji-unet",
    )
    assert found.get("CFG scale") == (None if guidance is None else str(guidance))
    assert found.get("Sampler") == scheduler
    settings = found.get("Token merging")
    assert (None if settings is None else read_metadata(settings)) == merging


def test_a_file_is_named_without_its_folders(tmp_path: Path):
    options = GenerateOptions(prompt="a", model=str(tmp_path))
    write_picture(Image.new("RGB", (1, 1)), parameters_of(options, (1, 1), 0, None), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        text = picture.text["parameters"]
    assert entries(text)["Model"] == tmp_path.name
    assert str(tmp_path) not in text
