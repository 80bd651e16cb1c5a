from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import hosts
import pytest
import torch
from torch import nn

from tokenmerge import MergeSharing, StepReuse, ToMeConfig, presets
from tokenmerge.errors import ConfigError
from tokenmerge_tools.bench import loaded_model
from tokenmerge_tools.bench.grid import PRESETS, BenchOptions, plan_cells, read_grid
from tokenmerge_tools.pipelines.meta_model import ModelSketch
from tokenmerge_tools.variants.variant import FEWER_STEPS, VARIANTS, Variant, parse_variant

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
# The others are of whole pipelines: benchmarks/measure.py draws them with evaluate.
GRIDS = [path for path in sorted(RESULTS.glob("*.toml")) if "scope" not in path.read_text(encoding="utf-8")]


def columns(**axes: object) -> list[str]:
    _, cells = plan_cells(BenchOptions(model=("geometry:tiny",), **axes), CPU)
    return [str(cell) for cell in cells]


def test_dense_with_fused_attention_is_always_measured() -> None:
    assert columns(variants=("tome",), attention=("default",)) == [
        "dense, sdpa",
        "dense, default",
        "tome ratio=0.5, default",
    ]


def test_every_axis_is_crossed_with_every_other() -> None:
    grid = BenchOptions(
        model=("geometry:tiny", "geometry:sd15"),
        size=("64", "128x64"),
        batch=(1, 2),
        dtype=("fp32", "bf16"),
        compile=(False, True),
        attention=("sdpa", "default"),
        variants=("tome",),
        ratio=(0.25, 0.5),
    )
    settings, cells = plan_cells(grid, CPU)
    assert len(set(settings)) == len(settings) == 16
    assert len(set(cells)) == len(cells) == 2 * 2 * 3
    sizes = [(setting.width, setting.height) for setting in settings]
    assert set(sizes) == {(64, 64), (128, 64)}


def test_auto_is_what_the_device_does_best() -> None:
    grid = BenchOptions(model=("geometry:tiny",), variants=("dense",))
    assert plan_cells(grid, CPU)[0][0].dtype == "fp32"
    assert plan_cells(grid, torch.device("cuda"))[0][0].dtype == "fp16"


class WanTransformer3DModel(nn.Module):
    """A video model, which is recognised by the name of its class."""

    config: ClassVar = {}


def test_frames_can_be_chosen_wherever_the_model_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "find_model", lambda name: name)
    sketches = {"owner/video": WanTransformer3DModel(), "owner/picture": nn.Identity()}
    monkeypatch.setattr(
        loaded_model, "load_sketch", lambda name: ModelSketch(sketches[name], None, 8, (64, 64))
    )
    settings, _ = plan_cells(BenchOptions(model=tuple(sketches), frames=9, variants=("dense",)), CPU)
    assert [setting.frames for setting in settings] == [9, None]


def test_methods_have_their_own_settings_and_ratio() -> None:
    specs = BenchOptions(
        variants=("todo", "toma:ratio=0.6", "sdtm:combine=keep", "ca_tome"), ratio=(0.3, 0.5)
    ).specs()
    assert [spec.label for spec in specs] == [
        "todo ratio=0.75",  # its planner ignores the ratio
        "toma ratio=0.6",
        "sdtm ratio=0.3 combine=keep",
        "sdtm ratio=0.5 combine=keep",
        "ca_tome ratio=0.3",
        "ca_tome ratio=0.5",
    ]
    assert [spec.config() for spec in specs[:3]] == [
        presets.todo(),
        presets.toma(0.6),
        presets.sdtm(0.3, combine="keep"),
    ]
    assert parse_variant("toma:max_downsample=8", [0.5]) == parse_variant("toma", [0.5])


def test_every_setting_can_be_told() -> None:
    text = (
        'tome:proportional,scope=block,reuse.every=2,rules=[{"level": 2, "ratio": 0.25, "sx": 4}, '
        '{"start": 0.5, "planner": "tiled"}],merge_sharing.blocks'
    )
    (spec,) = parse_variant(text, [0.5])
    config = ToMeConfig(
        proportional=True,
        scope="block",
        reuse=StepReuse(every=2),
        rules=[{"level": 2, "ratio": 0.25, "sx": 4}, {"start": 0.5, "planner": "tiled"}],
        merge_sharing=MergeSharing(blocks=True),
    )
    assert spec.config() == config
    # Settings that are read from a record give the same configuration.
    again = Variant("tome", tuple(json.loads(json.dumps(dict(spec.settings))).items()))
    assert again.config() == config
    assert again == spec


def test_auto_takes_a_speed_up_and_is_chosen_when_the_model_is_there() -> None:
    specs = parse_variant("auto:sx=4", [0.25], [1.5, 2.0])
    assert [spec.label for spec in specs] == ["auto speedup=1.5 sx=4", "auto speedup=2 sx=4"]
    assert specs[0].config(hosts.unet()).sx == 4


def test_settings_equal_to_the_defaults_do_not_make_another_variant() -> None:
    (plain,) = parse_variant("tome", [0.5])
    (spelled,) = parse_variant("tome: max_downsample = 1, merge_mlp=false, ratio=.5", [0.1])
    assert plain == spelled


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {FEWER_STEPS, "auto"}))
def test_each_variant_has_the_settings_it_is_applied_with(name: str) -> None:
    (spec,) = parse_variant(f"{name}:ratio=0.5" if VARIANTS[name].method else name, [0.3])
    config = spec.config()
    assert (config is None) == (VARIANTS[name].method is None)
    assert config is None or config.ratio == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tomy", "expected one of dense, auto, tome"),
        ("tome:speed=2", "expected settings out of ratio, max_downsample"),
        ("tomesd:st=1", "got 'st'"),
        ("tome:ratio=much", "expected ratio=NUMBER, got 'ratio=much'"),
        ("tome:scope=all", "scope: expected one of 'layers', 'block', 'keys', got 'all'"),
        ("tome:scope=keys,correction.every=3", "every token has a residual of its own"),
        ("oracle", "expected one of dense, auto, tome"),
        ("sdtm:ratio=0.6", "ratio"),
        ("auto:ratio=0.5", "auto"),
        ("auto:speedup=0.5", "speedup: expected a number ≥ 1"),
        ("tome:rules={", "rules=JSON"),
        ("tome:ratio=0.8", "0.75"),
        ("tome:merge_mlp=maybe", "true or false"),
        ("dense:ratio=0.5", "takes no settings"),
    ],
)
def test_an_unknown_variant_or_setting_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_variant(text, [0.5])


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"batch": (0,)}, "batch: expected an integer ≥ 1, got 0"),
        ({"model": ()}, "at least one"),
        ({"dtype": ("fp8",)}, "dtype"),
        ({"attention": ("flush",)}, "attention"),
        ({"size": ("wide",)}, "wide"),
        ({"rounds": 0}, "rounds"),
        ({"warmup": 0}, "warmup"),
        ({"guidance": float("nan")}, "guidance"),
        ({"threads": -1}, "threads"),
    ],
)
def test_values_out_of_range_are_named(axes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BenchOptions(**axes)


def test_a_file_has_axes_and_settings(tmp_path: Path) -> None:
    toml = tmp_path / "grid.toml"
    toml.write_text('size = [512, "768x512"]\nratio = [0.25, 0.5]\nsteps = 20\nmodel = "geometry:sdxl"\n')
    grid = BenchOptions.from_dict(read_grid(toml), "file")
    assert (grid.size, grid.model, grid.steps) == (("512", "768x512"), ("geometry:sdxl",), 20)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("grid.toml", "column = 1", "unknown setting 'column'; use some of model, size"),
        ("grid.toml", "steps = 'many'", "steps: expected an integer ≥ 1, got 'many'"),
        ("grid.toml", "compile = 1", "compile: expected True or False, got 1"),
        ("grid.toml", "batch = [true]", "batch: expected an integer ≥ 1, got True"),
        ("grid.toml", "steps =", "not valid TOML"),
        ("grid.yaml", "steps: 20", "expected a file ending in .toml, .*write the same values as TOML"),
        ("grid.toml", b"\xff\xfe", "is not UTF-8 text; give a TOML file"),
    ],
)
def test_a_file_that_is_no_grid_is_refused(tmp_path: Path, name: str, text: str | bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words):
        read_grid(path)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_columns_that_the_published_tables_leave_out(name: str) -> None:
    grid = BenchOptions.from_dict(read_grid(PRESETS[name]), name)
    _, cells = plan_cells(grid, torch.device("cuda"))
    found = {str(cell) for cell in cells}
    for attention in ("default", "sdpa", "xformers"):
        assert f"dense, {attention}" in found
        assert {f"tome ratio={ratio:g}, {attention}" for ratio in grid.ratio} <= found
    assert grid.about


def test_presets_cover_the_settings_of_the_published_tables() -> None:
    grids = {name: BenchOptions.from_dict(read_grid(path), name) for name, path in PRESETS.items()}
    settings, _ = plan_cells(grids.pop("diffusers-docs"), torch.device("cuda"))
    assert {(setting.height, setting.batch) for setting in settings} == {
        (side, batch) for side in (512, 768, 1024) for batch in (10, 8, 4, 2, 1)
    }
    assert {name: (grid.batch, grid.ratio) for name, grid in grids.items()} == {
        "paper": ((1,), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)),
        "ppdiffusers": ((1, 10, 16, 32, 64), (0.5, 0.749)),
    }


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_grids_of_the_published_results_are_valid(path: Path) -> None:
    (model,) = BenchOptions.from_dict(read_grid(path), str(path)).model
    specs = BenchOptions.from_dict(read_grid(path), str(path)).specs()
    # tomesd does not support the transformers of diffusers.
    assert "flux" in model or "tomesd" in {spec.name for spec in specs}


def test_there_are_grids_of_the_published_results() -> None:
    assert {"cpu-sd15", "gpu-sd15", "gpu-sdxl", "gpu-flux"} <= {path.stem for path in GRIDS}


def test_a_variant_of_a_pipeline_is_refused_with_the_command_that_times_it() -> None:
    with pytest.raises(ConfigError, match=r"expected some of dense, auto, .*'deepcache'.* evaluate times it"):
        BenchOptions(variants=("tome", "deepcache:interval=3"))
