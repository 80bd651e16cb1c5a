"""The file of a picture has its parameters, from which the same picture can be made again."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tokenmerge import ConfigError, ToMeConfig
from tokenmerge.config import to_metadata
from tokenmerge_tools.cli import main
from tokenmerge_tools.generate.parameters import Parameters, read_picture, write_picture

# A command line cannot contain a null character, and lines in a PNG file end with "\n".
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"))
NAME = st.none() | TEXT
CONFIGS = st.none() | st.builds(ToMeConfig, ratio=st.floats(0, 0.75), seed=st.integers(0, 99))
PARAMETERS = st.builds(
    Parameters,
    prompt=TEXT.filter(lambda text: "\nNegative prompt: " not in text),
    seed=st.integers(0, 2**63),
    steps=st.integers(1, 1000),
    size=st.tuples(st.integers(1, 9999), st.integers(1, 9999)),
    negative_prompt=st.none() | TEXT,
    guidance=st.none() | st.floats(0, 100),
    scheduler=NAME,
    model=NAME,
    controlnet=NAME,
    merging=CONFIGS,
)


@pytest.fixture(scope="module")
def picture(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("parameters") / "picture.png"


@given(PARAMETERS)
def test_parameters_are_read_as_they_were_written(picture, parameters):
    metadata = None if parameters.merging is None else to_metadata(parameters.merging, "auto")
    write_picture(Image.new("RGB", (1, 1)), parameters, metadata, picture)
    assert read_picture(picture) == parameters


def written(path: Path, text: str) -> Path:
    info = PngInfo()
    info.add_text("parameters", text)
    Image.new("RGB", (1, 1)).save(path, pnginfo=info)
    return path


def test_a_picture_of_a_web_ui_is_read(picture):
    """The form that AUTOMATIC1111 writes, with entries that are ignored here."""
    text = (
        "a castle, (mist:1.2)\non a hill\nNegative prompt: blurry,\nlow quality\n"
        "Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7, Seed: 123, Size: 512x768, "
        'Model hash: 6ce0161689, Model: v1-5-pruned, Lora hashes: "a: 1, b: 2", Version: v1.10.1'
    )
    assert read_picture(written(picture, text)) == Parameters(
        prompt="a castle, (mist:1.2)\non a hill",
        negative_prompt="blurry,\nlow quality",
        seed=123,
        steps=20,
        size=(512, 768),
        guidance=7.0,
        scheduler="DPM++ 2M",
        model="v1-5-pruned",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nSteps: many, Seed: 1", "like: .*picture.png: Steps: expected an integer, got 'many'"),
        ('a\nSteps: 2, Token merging: "auto 0.5"', "like: .*: metadata: expected a text"),
    ],
)
def test_a_wrong_entry_is_named(picture, text, message):
    with pytest.raises(ConfigError, match=message):
        read_picture(written(picture, text))


HOSTILE = {
    "a word without a colon": "a",
    "words without a colon": "a b ",
    "blanks": " ",
    "backslashes in an open quote": '"\\\\',
    "open quotes": 'ab:"x,',
    "names without values": "ab: ",
}


@pytest.mark.parametrize("part", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_text_is_read_in_linear_time(picture, part):
    """Quadratic time would be minutes. The bound is some hundred times what it takes."""
    text = "a\nSteps: 20, ab: "
    text += part * ((100_000 - len(text)) // len(part))
    begun = time.perf_counter()
    assert read_picture(written(picture, text)).steps == 20
    assert time.perf_counter() - begun < 60


def test_a_text_that_is_too_long_is_refused(picture):
    with pytest.raises(ConfigError, match="expected at most 100,000 characters, got 100,009"):
        read_picture(written(picture, "a" * 100_000 + "\nSteps: 2"))
    with pytest.raises(ConfigError, match="like: "):  # more than Pillow decompresses
        read_picture(written(picture, "a" * 2_000_000))


def test_a_long_value_is_shortened_in_the_message(picture):
    with pytest.raises(ConfigError, match="Seed: expected an integer") as caught:
        read_picture(written(picture, f"a\nSteps: 2, Size: {'9' * 5_000}x1, Seed: {'9' * 5_000}"))
    assert len(str(caught.value)) < 1_000


def test_a_file_that_says_nothing_is_refused(picture):
    with pytest.raises(ConfigError, match=r"like: cannot read .*no\.png \(No such file or directory\)"):
        read_picture(picture.with_name("no.png"))
    picture.write_text("no picture")
    with pytest.raises(ConfigError, match=r"it is not a picture\); give a PNG that tokenmerge generate"):
        read_picture(picture)
    Image.new("RGB", (1, 1)).save(picture)
    with pytest.raises(ConfigError, match="does not say what it was made with; give a PNG"):
        read_picture(picture)


# --- generate --like ------------------------------------------------------------------------------


def run(*arguments: object) -> None:
    assert main(["generate", *map(str, arguments), "--repeat", "1"]) == 0


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory) -> Path:
    """Pictures of a run in which many options differ from their defaults."""
    out = tmp_path_factory.mktemp("made") / "out"
    settings = "--steps 3 --seed 5 --size 32x48 --guidance 3 --negative-prompt blue --scheduler ddpm"
    merging = "--ratio 0.3 --set reuse.every=2 --set min_tokens=4 --set correction.every=2"
    run("a red, apple", "--model", folder, "--out", out, *settings.split(), *merging.split())
    return out


def test_like_draws_the_same_picture_with_the_same_settings(made, folder, tmp_path):
    run("--like", made / "merged-00.png", "--model", folder, "--out", tmp_path)
    for name in ("merged-00.png", "dense-00.png"):
        assert np.array_equal(pixels(tmp_path / name), pixels(made / name))
    before, after = (json.loads((at / "run.json").read_text())["conditions"] for at in (made, tmp_path))
    assert after["config"] == before["config"]


def test_what_is_given_beside_like_goes_before_it(made, folder, tmp_path, capsys):
    given = ("a rocket", "--seed", 7, "--ratio", 0.5, "--no-compare")
    run("--like", made / "merged-00.png", "--model", folder, "--out", tmp_path, *given)
    before = read_picture(made / "merged-00.png")
    after = read_picture(tmp_path / "merged-00.png")
    assert (after.prompt, after.seed, after.merging.ratio) == ("a rocket", 7, 0.5)
    assert (after.size, after.steps, after.merging.reuse) == (before.size, before.steps, before.merging.reuse)
    run(
        "--like",
        made / "dense-00.png",
        "--model",
        folder,
        "--out",
        tmp_path,
        "--method",
        "tome",
        "--no-compare",
    )
    assert read_picture(tmp_path / "merged-00.png").merging == ToMeConfig()
    assert "it has no settings of token merging" in capsys.readouterr().err


def test_a_file_is_named_without_its_folders(made, folder):
    assert str(folder.parent) not in (made / "merged-00.png").read_bytes().decode("latin-1")
    assert read_picture(made / "merged-00.png").model == folder.name


def test_no_model_is_loaded_because_a_picture_says_so(picture, capsys):
    """An unknown sampler is not used either."""
    written(picture, "a\nSteps: 2, Sampler: Euler a, Model: somebody/model")
    assert main(["generate", "--like", str(picture)]) == 2
    assert (
        "was made with the model 'somebody/model'; give this or another model with --model"
        in capsys.readouterr().err
    )
    assert main(["generate", "--like", str(picture), "--model", "nothing"]) == 2
    printed = capsys.readouterr().err
    assert "the sampler 'Euler a' is unknown" in printed
    assert "'nothing' is not a model" in printed
