"""The report says what a real run does."""

import dataclasses
import html
import re
from types import SimpleNamespace

import accelerate
import hosts
import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from tests.models.test_every_family import model_of
from tests.models.tiny import FAMILIES
from torch.utils.flop_counter import FlopCounterMode

from tokenmerge import (
    ConfigError,
    Correction,
    MergeSharing,
    NothingToMergeError,
    StepReuse,
    ToMeConfig,
    apply_token_merging,
    presets,
    token_merging,
)
from tokenmerge.config import dense_outside
from tokenmerge.models.find import find_hosts
from tokenmerge.report import Report, predict
from tokenmerge.report import flops as counting
from tokenmerge.report.flops import count_flops, weightless
from tokenmerge.report.notes import notes_on_steps

HALF = ToMeConfig(ratio=0.5)


def flops(model: torch.nn.Module, **arguments: object) -> int:
    """FLOPs of a real run, with attention by plain products, which the counter knows on every device."""
    kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, kernel:
        hosts.call(model, **arguments)
    return counter.get_total_flops()


def test_the_counts_are_those_of_real_runs():
    unet = hosts.unet()
    inputs = {**hosts.inputs(), "encoder_hidden_states": torch.zeros(2, 77, hosts.TEXT)}
    dense = flops(unet, **inputs)
    patch = apply_token_merging(unet, HALF)
    merged = flops(unet, **inputs)
    assert (patch.report().flops_dense, patch.report().flops_merged) == (dense, merged)
    assert merged < dense


def test_the_saving_of_a_block_is_the_analytic_one():
    """Self-attention on m of n tokens, minus the similarities: 4·(n² − m²)·c + 8·(n − m)·c² − 2·s·d·c."""
    (row, *_) = predict(hosts.unet(), HALF, 32, 32, batch=1).rows
    n, m, s, d, c = 1024, 512, 768, 256, 32
    assert (row.tokens, row.merged_tokens, row.grid, row.merged) == (n, m, (32, 32), "attn1")
    saved = 4 * (n**2 - m**2) * c + 8 * (n - m) * c**2 - 2 * s * d * c
    assert row.flops_dense - row.flops_merged == saved


def test_a_row_for_each_block_that_merges_and_a_note_for_those_that_do_not():
    report = predict(hosts.unet(), HALF)
    assert [row.path for row in report.rows] == [
        "down_blocks.0.attentions.0.transformer_blocks.0",
        "up_blocks.1.attentions.0.transformer_blocks.0",
        "up_blocks.1.attentions.1.transformer_blocks.0",
    ]
    assert report.notes == ("4 blocks do not merge at level 2: max_downsample=1",)
    saved = sum(row.flops_dense - row.flops_merged for row in report.rows)
    assert report.flops_dense - report.flops_merged == saved


def test_the_report_shows_the_share_of_what_merges():
    """Whole blocks are counted with all of their layers, other settings with the layers that merge."""
    unet = hosts.unet()
    (copied,) = find_hosts(weightless(unet))
    counts = count_flops(copied.root, copied.example(16, 16, 2))
    rows = predict(unet, HALF, 16, 16).rows
    for config, layer in ((HALF, ".attn1"), (dataclasses.replace(HALF, scope="block"), "")):
        report = predict(unet, config, 16, 16)
        merging = sum(counts[f"UNet2DConditionModel.{row.path}{layer}"] for row in rows)
        assert report.flops_merging == merging
        share = 100 * merging / report.flops_dense
        assert f"what merges has {share:.1f} % of the operations of the unchanged model" in str(report)


def test_looking_changes_nothing_on_a_model_patched_or_not():
    unet = hosts.unet()
    dense = hosts.call(unet, **hosts.inputs())
    patch = apply_token_merging(unet, HALF)
    merged = hosts.call(unet, **hosts.inputs())
    other = predict(unet, ToMeConfig(ratio=0.25))
    assert other.flops_dense == patch.report().flops_dense == predict(hosts.unet(), HALF).flops_dense
    assert other.flops_merged > patch.report().flops_merged
    assert torch.equal(hosts.call(unet, **hosts.inputs()), merged)
    patch.remove()
    assert torch.equal(hosts.call(unet, **hosts.inputs()), dense)


def test_no_weights_are_needed():
    with torch.device("meta"):
        unet = hosts.unet()
    assert predict(unet, HALF) == predict(hosts.unet(), HALF)


def test_half_precision_and_sdxl_and_controlnets_and_compvis():
    assert predict(hosts.unet().half(), HALF).rows
    sdxl = predict(hosts.sdxl(), ToMeConfig(ratio=0.5, max_downsample=2))
    assert [row.path.rpartition(".")[2] for row in sdxl.joined_rows()] == ["0-1"] * 4
    assert sum(row.blocks for row in sdxl.joined_rows()) == len(sdxl.rows) == 8
    assert predict(hosts.controlnet(), HALF, 16, 16).model == "ControlNetModel"
    assert predict(hosts.controlnet_union(), HALF, 16, 16).model == "ControlNetUnionModel"
    assert predict(hosts.LatentDiffusion(), HALF).rows[0].path.startswith("input_blocks.0.1")


def test_a_pipeline_is_its_models_together():
    pipe = SimpleNamespace(unet=hosts.unet(), controlnet=[hosts.controlnet(), hosts.controlnet()])
    report = predict(pipe, HALF)
    assert report.model == "UNet2DConditionModel + ControlNetModel 1 + ControlNetModel 2"
    control = predict(hosts.controlnet(), HALF, 16, 16)
    assert report.flops_merged == predict(hosts.unet(), HALF).flops_merged + 2 * control.flops_merged
    assert [row.model for row in report.joined_rows()][-2:] == ["ControlNetModel 1", "ControlNetModel 2"]
    assert "ControlNetModel 2: down_blocks.0.attentions.0.transformer_blocks.0 " in str(report)


def offloaded(unet: torch.nn.Module) -> torch.nn.Module:
    return accelerate.cpu_offload(unet, execution_device=torch.device("cpu"))


def group_offloaded(unet: torch.nn.Module) -> torch.nn.Module:
    kwargs = {"onload_device": torch.device("cpu"), "offload_type": "leaf_level"}
    unet.enable_group_offload(**kwargs)
    return unet


def cast_by_layer(unet: torch.nn.Module) -> torch.nn.Module:
    unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    return unet


def compiled(unet: torch.nn.Module) -> torch.nn.Module:
    unet.compile(backend="eager")
    return unet


@pytest.mark.parametrize("change", [offloaded, group_offloaded, cast_by_layer, compiled])
def test_models_that_other_software_has_wrapped(change):
    unet = change(hosts.unet())
    assert predict(unet, HALF) == predict(hosts.unet(), HALF)
    patch = apply_token_merging(unet, HALF)
    assert patch.report() == predict(hosts.unet(), HALF)


def test_an_ip_adapter():
    unet = hosts.unet(encoder_hid_dim_type=None)
    projection = ImageProjection(image_embed_dim=8, cross_attention_dim=hosts.TEXT, num_image_text_embeds=2)
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj")
    for name, module in unet.named_modules():
        if name.endswith("attn2"):
            module.set_processor(IPAdapterAttnProcessor2_0(module.inner_dim, hosts.TEXT, num_tokens=(2,)))
    assert len(predict(unet, HALF).rows) == 3


def test_the_table():
    text = str(predict(hosts.unet(), HALF))
    lines = text.splitlines()
    assert lines[0] == "UNet2DConditionModel: 16 × 16 latents"
    assert re.fullmatch(r"counted by operations: 1\.09× \([78]\.\d % of the operations saved\)", lines[1])
    assert lines[2].split() == ["block", "grid", "tokens", "merged", "GFLOPs", "saved"]  # all at level 1
    assert "256 → 128" in lines[3]
    assert "self-attention" in lines[3]
    assert lines[-5].startswith("whole model")
    assert re.search(
        r"^all other layers, in steps that run them .*  0\.0 %$", lines[-6]
    )  # merging changes none of them
    assert lines[-2] == "note: level: 1 has the most tokens; at 4, a grid is a quarter as wide"
    assert lines[-3].startswith("note: what merges has ")
    assert lines[-4] == "note: 4 blocks do not merge at level 2: max_downsample=1"
    few = str(predict(hosts.unet(), ToMeConfig(ratio=0.5, max_downsample=2, min_tokens=200)))
    assert "4 blocks do not merge: fewer than 200 tokens (min_tokens)" in few
    assert "note: level" not in few  # none but the first is named
    one_call = "note: GFLOPs: of one call of the model, on a batch of"
    assert lines[-1] == f"{one_call} 2 (with guidance, one image is two samples)"
    assert str(predict(hosts.unet(), HALF, batch=1)).splitlines()[-1] == f"{one_call} 1"


def test_notes_on_ratio_0_small_levels_chunks_and_blocks_that_cost_more():
    assert predict(hosts.unet(), ToMeConfig(ratio=0)).notes == ("no token merges",)
    small = predict(hosts.unet(), ToMeConfig(ratio=0.5, max_downsample=2), 2, 8)
    assert any(
        "down_blocks.1.attentions.0.transformer_blocks.0 stays dense: its token grid" in n
        for n in small.notes
    )
    costly = predict(hosts.unet(), ToMeConfig(ratio=0.01))
    assert any("merging costs more operations than it saves" in note for note in costly.notes)
    unet = hosts.unet()
    unet.down_blocks[0].attentions[0].transformer_blocks[0].set_chunk_feed_forward(64, dim=1)
    chunked = predict(unet, ToMeConfig(ratio=0.5, merge_mlp=True))
    assert any("feed-forward layers that run in chunks stay dense" in note for note in chunked.notes)
    assert [row.merged for row in chunked.rows] == ["attn1", "attn1+ff", "attn1+ff"]


def test_errors():
    with pytest.raises(NothingToMergeError, match="the sample gives 1 × 9"):
        predict(hosts.unet(), HALF, 1, 9)
    with pytest.raises(ConfigError, match="height: expected an integer ≥ 1, got 0"):
        predict(hosts.unet(), HALF, 0, 9)
    with pytest.raises(ConfigError, match="width: expected an integer ≥ 1, got nan"):
        predict(hosts.unet(), HALF, 8, float("nan"))
    with pytest.raises(ConfigError, match="ControlNetModel has no default size; pass both"):
        predict(hosts.controlnet(), HALF)


def test_published_geometries():
    """Stable Diffusion 1.5 at 512 × 512: five blocks of 64 × 64 tokens."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    report = predict(unet, HALF)
    assert [(row.tokens, row.merged_tokens) for row in report.rows] == [(4096, 2048)] * 5
    assert dataclasses.asdict(report)["rows"][0]["level"] == 1


# --- settings that follow the denoising steps ------------------------------------------------------------


CHANNELS, TOKENS, BLOCKS = 32, 256, 3  # of the finest level of the UNet at its own size
BELOW = 2  # times as many channels as tokens of the finest level has what comes up to it
FLOAT32 = 4  # bytes
# An index for each token that stays, moves, where to, and where from; and how many are in each that stays.
PLAN = TOKENS * 5 // 2 * 8 + TOKENS // 2 * FLOAT32


@pytest.mark.parametrize(
    ("settings", "results"),
    [
        ({"correction": Correction(every=3)}, BLOCKS),  # of attention
        ({"correction": Correction(every=3), "merge_mlp": True}, 2 * BLOCKS),
        ({"correction": Correction(every=3), "scope": "block"}, BLOCKS),
        ({"reuse": StepReuse(every=2)}, 2 * BELOW),
        (
            {"reuse": StepReuse(every=3), "scope": "block", "rules": dense_outside(0, 0.1)},
            2 * BELOW,
        ),
        ({"reuse": StepReuse(every=2, shallow_every=2)}, 2 * BELOW + 2),
        ({"merge_sharing": MergeSharing(every=3)}, 0),
    ],
)
def test_what_is_kept_between_steps_is_counted(settings, results):
    report = predict(hosts.unet(), ToMeConfig(**settings), batch=3)
    assert report.kept_bytes == 3 * (results * TOKENS * CHANNELS * FLOAT32 + BLOCKS * PLAN)
    assert f"cache between steps: {report.kept_bytes / 1e6:.1f} MB" in report.notes


def test_settings_that_do_not_follow_the_steps_keep_nothing():
    report = predict(hosts.unet(), ToMeConfig(merge_sharing=MergeSharing(blocks=True)))
    assert report.kept_bytes == 0
    assert not any("cache between steps" in note for note in report.notes)


def test_half_precision_keeps_half_of_what_is_changed():
    config, plans = ToMeConfig(correction=Correction(every=2)), 2 * BLOCKS * PLAN
    half, whole = (predict(unet, config).kept_bytes - plans for unet in (hosts.unet().half(), hosts.unet()))
    assert 0 < half == whole / 2


def over_steps(steps: int, **settings: object) -> Report:
    return predict(hosts.unet(), ToMeConfig(**settings), steps=steps)


def test_the_mean_over_steps_is_that_of_dense_and_merged_ones():
    report = over_steps(4, rules=dense_outside(0, 0.25))
    assert report.steps == 4
    assert report.flops_mean == (report.flops_merged + 3 * report.flops_dense) / 4
    assert report.flops_merged == predict(hosts.unet(), HALF).flops_merged
    saving = (report.flops_dense - report.flops_merged) / 4 / report.flops_dense
    (line,) = [line for line in str(report).splitlines() if line.startswith("mean over 4 steps ")]
    assert line.endswith(f" {100 * saving:.1f} %")


def test_a_dense_step_that_tells_what_merging_loses_costs_no_more_than_another():
    report = over_steps(2, correction=Correction(every=2), scope="block")
    assert report.flops_mean * 2 == report.flops_dense + report.flops_merged


def test_blocks_that_do_not_run_cost_nothing():
    report = predict(
        model_of(FAMILIES["SD3Transformer2DModel"]), ToMeConfig(reuse=StepReuse(every=2)), steps=4
    )
    blocks = sum(row.flops_merged for row in report.rows)
    assert report.flops_mean * 4 == 4 * report.flops_merged - blocks  # the third of four


def test_stages_that_do_not_run_cost_nothing():
    report = over_steps(4, reuse=StepReuse(every=2))
    (host,) = find_hosts(weightless(hosts.unet()))
    flops = count_flops(host.root, host.example(16, 16, 2))
    below = sum(
        flops[f"UNet2DConditionModel.{path}"] for path in ("down_blocks.1", "mid_block", "up_blocks.0")
    )
    assert report.flops_mean * 4 == 4 * report.flops_merged - below  # the third of four


def test_without_steps_or_where_all_are_alike_no_mean_is_told():
    for report in (
        predict(hosts.unet(), ToMeConfig(rules=dense_outside(0, 0.5))),
        predict(hosts.unet(), HALF, steps=3),
    ):
        assert (report.steps, report.flops_mean) == (None, None)
        assert "mean over" not in str(report)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            ToMeConfig(rules=dense_outside(0, 0.75)),
            "from 75 % of the steps on: nothing merges, and nothing is skipped",
        ),
        (presets.sdtm(), "from 80 % of the steps on: ratio=0.34"),
        (presets.sdtm(), "from 40 % of the steps on: planner=tome"),
        (presets.sdtm(), "blocks are counted in the step that merges most"),
        (presets.toma(), "a plan is used for 5 steps"),
        (presets.ibtm(), "the planner 'tome' runs until the first guided step"),
        (ToMeConfig(correction=Correction(every=4)), "1 of 4 full steps merges nothing"),
        (ToMeConfig(merge_sharing=MergeSharing(every=4)), "a plan is used for 4 steps"),
        (ToMeConfig(reuse=StepReuse(every=2)), "1 of 2 steps is full"),
        (
            ToMeConfig(reuse=StepReuse(every=4, shallow_every=3)),
            "1 of 3 steps runs the finest level of a UNet",
        ),
        (
            ToMeConfig(reuse=StepReuse(full_steps=(0, 0.05, 1))),
            "steps at 0 %, 5 %, 100 % of the way are full",
        ),
        (ToMeConfig(max_downsample=2, rules=[{"level": 2, "ratio": 0.25}]), "level 2: ratio=0.25"),
        (
            ToMeConfig(rules=[{"until": 0.5, "ratio": 0.6, "sx": 4}, {"start": 0.5, "ratio": 0.4}]),
            "the ratio changes over the steps: 0.6 from 0 %, 0.4 from 50 % on",
        ),
    ],
)
def test_notes_say_what_follows_the_steps(config, words):
    assert sum(words in note for note in notes_on_steps(config)) == 1, notes_on_steps(config)
    assert notes_on_steps(HALF) == []
    where = "blocks are counted in the step that merges most"
    assert where in notes_on_steps(presets.sdtm(), 20)  # its rules merge less in later steps
    assert where not in notes_on_steps(ToMeConfig(reuse=StepReuse(every=2)), 20)


def test_a_rule_that_the_plan_shows_has_no_note_beside_it():
    late = {"start": 0.5, "ratio": 0.0}
    dense = ToMeConfig(rules=[late])
    assert "from 50 % of the steps on: ratio=0.0" in notes_on_steps(dense)  # without a plan
    assert all("ratio=0.0" not in note for note in notes_on_steps(dense, 20))
    of_level = ToMeConfig(max_downsample=2, rules=[{**late, "level": 2}])
    assert any("level 2" in note for note in notes_on_steps(of_level, 20))


def test_a_known_number_of_steps_gives_the_plan():
    reuse = StepReuse(full_steps=(0, 0.2, 1), shallow_steps=(0.4,))
    config = ToMeConfig(min_tokens=10**6, reuse=reuse)
    report = predict(hosts.unet(), config, steps=6)
    with pytest.warns(DeprecationWarning, match=r"Report\.step_signs"):
        assert getattr(report, "plan") == report.step_signs  # noqa: B009
    assert report.step_signs == "DDs··D"
    corrected = dataclasses.replace(config, correction=Correction(every=2))  # there is nothing to correct
    assert predict(hosts.unet(), corrected, steps=6).step_signs == report.step_signs
    assert set(notes_on_steps(config, 6)) < set(report.notes)
    assert not any("1 of" in note or "are full" in note for note in report.notes)
    lines = str(report).splitlines()
    assert lines[1].startswith(f"counted by operations: {report.speedup:.2f}× (")
    assert lines[2:4] == [
        "plan: DDs··D",
        "      D in 3 full steps: the whole model runs, and no token merges",
    ]
    assert predict(SimpleNamespace(unet=hosts.unet(), vae_scale_factor=8), HALF).scale == 8
    assert ": 192 × 128 px (24 × 16 latents), 6 steps\n" in str(
        dataclasses.replace(report, width=24, scale=8)
    )
    assert predict(hosts.unet(), config).step_signs == ""


@pytest.mark.parametrize("config", [presets.sdtm(), presets.ibtm(max_downsample=2, min_tokens=200)])
def test_the_report_has_these_notes_and_those_on_small_grids(config):
    notes = predict(hosts.unet(), config).notes
    assert set(notes_on_steps(config)) < set(notes)
    small = "4 blocks do not merge: fewer than 200 tokens (min_tokens)"
    assert (small in notes) == bool(config.min_tokens)


def test_levels_are_counted_with_their_own_settings():
    report = predict(hosts.unet(), ToMeConfig(max_downsample=2, rules=[{"level": 2, "ratio": 0.25}]))
    assert {(row.level, row.tokens - row.merged_tokens) for row in report.rows} == {(1, 128), (2, 16)}


def test_cached_shapes_are_those_that_are_computed_anew(monkeypatch):
    """Operations with the same inputs run once; the counts are the same without this cache."""
    model = model_of(FAMILIES["FluxTransformer2DModel"])
    config = ToMeConfig(ratio=0.5, planner="tiled", proportional=True, correction=Correction(every=2))
    counting._RESULTS.clear()
    first = predict(model, config, 16, 16, steps=4)
    cached = len(counting._RESULTS)
    again = predict(model, config, 16, 16, steps=4)
    assert len(counting._RESULTS) == cached > 0
    monkeypatch.setattr(counting, "_aliases", lambda func: True)
    assert first == again == predict(model, config, 16, 16, steps=4)


def test_html_has_the_cells_and_notes_of_the_text():
    with token_merging(hosts.unet(), ToMeConfig(ratio=0.5, rules=[{"level": 2, "ratio": 0.25}])) as patch:
        report = patch.report()
    shown = report._repr_html_()
    cells = [html.unescape(cell) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", shown)]
    text = str(report).split("\nnote: ")
    table = text[0].split("\n", 2)[2]  # its title has two lines
    assert "".join(" ".join(cells).split()) == "".join(table.split())
    assert [html.unescape(note) for note in re.findall("<li>(.*?)</li>", shown)] == text[1:]
    assert shown.count("<tr>") == 3 + len(list(report.joined_rows()))
    assert f"<caption>{report.model}" in shown


def test_in_inference_mode_the_same_is_counted(monkeypatch):
    """PyTorch does not take composite operations apart there, such as linear layers."""
    unet = hosts.unet()
    expected = predict(unet, HALF)
    monkeypatch.setattr(counting, "_RESULTS", {})
    with torch.inference_mode():
        assert predict(unet, HALF) == expected


QUANTIZED = ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("of", ["unet", "FluxTransformer2DModel"])
def test_quantized_weights_are_counted_as_dense_ones(name, of):
    quantization = pytest.importorskip("torchao.quantization")
    model = hosts.unet() if of == "unet" else model_of(FAMILIES[of])
    expected = predict(model, ToMeConfig(ratio=0.5), 16, 16)
    quantization.quantize_(model, getattr(quantization, name)())
    assert type(next(p for p in model.parameters() if p.ndim == 2).data) is not torch.Tensor
    found = predict(model, ToMeConfig(ratio=0.5), 16, 16)
    assert (found.flops_dense, found.flops_merged) == (expected.flops_dense, expected.flops_merged)


def test_a_model_that_cannot_be_copied_is_not_advised_about_its_size(monkeypatch):
    def fails(*_: object) -> None:
        raise NotImplementedError("aten.empty_like")

    unet = hosts.unet()
    monkeypatch.setattr(counting, "_without_values", fails)
    with pytest.raises(ConfigError) as caught:
        predict(unet, ToMeConfig(ratio=0.5), 16, 16)
    told = str(caught.value)
    assert "cannot be copied without its weights (aten.empty_like); generating works as before" in told
    assert "height" not in told
