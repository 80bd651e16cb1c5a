"""Models that ``inspect`` takes: names, folders and config files."""

import json
import shutil

import pytest
from diffusers import FluxTransformer2DModel
from tests import tiny_pipeline

from tokenmerge import ConfigError, UnsupportedModelError
from tokenmerge_tools.pipelines.loading import find_model
from tokenmerge_tools.pipelines.meta_model import load_sketch, sketch


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copied")


def test_a_folder_and_its_files_say_the_same(folder):
    wanted = load_sketch(find_model(str(folder)))
    for name in ("", "model_index.json", "unet", "unet/config.json"):
        found = sketch(str(folder / name))
        assert dict(found.denoiser.config) == dict(wanted.denoiser.config)
        assert (found.scale, found.size, found.notes) == (tiny_pipeline.SCALE, wanted.size, ())
        assert all(weight.is_meta for weight in found.denoiser.parameters())


def test_without_a_vae_beside_it_eight_pixels_are_assumed_and_told(copied):
    (copied / "vae" / "config.json").unlink()
    found = sketch(str(copied / "unet"))
    assert found.scale == 8
    assert found.notes[0].startswith("pixels: assumed the usual 8 per latent position, because there is no ")
    assert str(copied / "vae" / "config.json") in found.notes[0]


def test_where_the_config_has_no_size_the_family_knows_one(tmp_path):
    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, num_attention_heads=2, joint_attention_dim=8
    )
    model.save_config(tmp_path / "transformer")
    assert sketch(str(tmp_path / "transformer")).size == (1024, 1024)


@pytest.mark.parametrize("missing", ["unet", "vae"])
def test_the_missing_file_is_named(copied, missing):
    file = copied / missing / "config.json"
    file.unlink()
    with pytest.raises(ConfigError, match="there is no file") as raised:
        sketch(str(copied))
    assert str(file) in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*nothing\.json"):
        sketch(str(tmp_path / "nothing.json"))
    with pytest.raises(ConfigError):
        sketch(str(tmp_path / "model_index.json"))


@pytest.mark.parametrize("content", ["[]", "5", "{", "[" * 100_000, "{}"])
def test_a_config_that_is_none_is_one_short_line(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"^model: ") as raised:
        sketch(str(file))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("name", ["FutureModel", "DDIMScheduler", None])
def test_a_class_that_is_no_model_is_named(tmp_path, name):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"_class_name": name}))
    with pytest.raises(UnsupportedModelError, match=f"has no class {name} for the denoiser"):
        sketch(str(file))
