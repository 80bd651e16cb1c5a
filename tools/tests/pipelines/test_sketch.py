"""Models without weights, from the config files in their folders."""

import shutil

import pytest

from tokenmerge import ConfigError
from tokenmerge_tools.pipelines.loading import find_model
from tokenmerge_tools.pipelines.meta_model import load_sketch


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copied")


@pytest.mark.parametrize("missing", ["unet", "vae"])
def test_the_missing_file_is_named(copied, missing):
    file = copied / missing / "config.json"
    file.unlink()
    with pytest.raises(ConfigError, match="there is no file") as raised:
        load_sketch(find_model(str(copied)))
    assert str(file) in str(raised.value)
