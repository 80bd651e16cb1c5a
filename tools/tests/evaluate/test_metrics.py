from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tools.tests.evaluate.conftest import drawn, item, picture
from torchmetrics.multimodal import CLIPScore

from tokenmerge.errors import ConfigError, MissingExtraError
from tokenmerge.origin import installable
from tokenmerge_tools.demo.retrieval import GRID
from tokenmerge_tools.evaluate.measure import measure
from tokenmerge_tools.evaluate.metrics import load_metrics, parse_metrics
from tokenmerge_tools.evaluate.networks import Clip, Vision
from tokenmerge_tools.evaluate.picture_store import PictureStore
from tokenmerge_tools.sheets import as_tensor

PROMPTS = ["red apple", "blue boat", "a very long prompt " * 9]


def load(*texts: str, prompts: list[str] = PROMPTS, notes: list[str] | None = None):
    return load_metrics(parse_metrics(texts), prompts, (notes if notes is not None else []).append)


def values(metric: str, *texts: str) -> torch.Tensor:
    (found,) = [one for one in load(*texts).of_pictures if one.name == metric]
    dense = [picture(seed) for seed in range(3)]
    return found.measure([dense[0], picture(8), picture(9)], dense, PROMPTS)


def test_similarity_is_one_for_equal_pictures_and_less_for_others(models: Path) -> None:
    for name, folder in (("dino", "dino"), ("clip", "clip")):
        found = values(name, f"{name}={models / folder}")
        torch.testing.assert_close(found[0], torch.tensor(1.0))
        assert (found[1:] < 0.999).all()


def test_similarity_compares_with_the_dense_pictures_of_the_call(models: Path) -> None:
    (dino,) = [m for m in load(f"dino={models / 'dino'}").of_pictures if m.name == "dino"]
    first, second = [picture(0)], [picture(1)]
    assert dino.measure(first, first, PROMPTS[:1]) == pytest.approx(1)
    assert dino.measure(first, second, PROMPTS[:1]) < 0.999
    assert dino.measure(second, second, PROMPTS[:1]) == pytest.approx(1)


def test_features_do_not_depend_on_the_batch(models: Path) -> None:
    network = Vision(str(models / "dino"))
    pictures = [picture(seed) for seed in range(3)]
    together = network(pictures)
    assert together.shape == (3, 16)
    torch.testing.assert_close(torch.cat([network([one]) for one in pictures]), together)


@pytest.mark.parametrize("name", ["clip", "dino"])
def test_networks_are_not_read_from_pickles(models: Path, tmp_path: Path, name: str) -> None:
    """A pickle can run code when it is loaded."""
    folder = shutil.copytree(models / name, tmp_path / name)
    (weights,) = folder.glob("*.safetensors")
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    load(f"{name}={folder}")
    weights.unlink()
    with pytest.raises(ConfigError, match="cannot load"):
        load(f"{name}={folder}")


def test_clip_score_is_that_of_torchmetrics(models: Path) -> None:
    clip = Clip(str(models / "clip"))

    class Adapted(torch.nn.Module):
        """CLIP with features as tensors, as torchmetrics expects."""

        config = SimpleNamespace()

        def get_image_features(self, pixels):
            return clip.model.get_image_features(pixels).pooler_output

        def get_text_features(self, ids, mask):
            return clip.model.get_text_features(ids, mask).pooler_output

    def processor(images=None, text=None, **kwargs):
        if images is not None:
            return clip.processor(images=images, return_tensors="pt")
        return clip.tokenizer(text, return_tensors="pt", padding=True)

    score = CLIPScore(model_name_or_path=lambda: (Adapted(), processor))
    found = values("clip-score", f"clip-score={models / 'clip'}")
    pictures = [picture(0), picture(8)]
    for index in (0, 1):
        pixels = (as_tensor([pictures[index]])[0] * 255).byte()
        torch.testing.assert_close(found[index], score(pixels, PROMPTS[index]).detach())
    assert torch.isfinite(found[2])  # its prompt is longer than the model's context


def test_a_network_without_text_has_no_clip_score(models: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"metric clip-score: Dinov2Model in .* has no text encoder; use a CLIP"
    ):
        load(f"clip-score={models / 'dino'}")


def test_metrics_that_take_the_same_network_share_it(models: Path) -> None:
    metrics = load(*(f"{name}={models / 'dino'}" for name in ("dino", "fid", "kid")))
    assert len(metrics.loaded) == 1
    assert dict.fromkeys(("fid", "kid"), metrics.loaded[0]) == metrics.of_sets
    assert [metric.name for metric in metrics.of_pictures] == ["psnr", "ssim", "dino"]
    metrics = load(*(f"{name}={models / 'clip'}" for name in ("clip", "clip-score")))
    assert len(metrics.loaded) == 1
    assert metrics.networks == dict.fromkeys(("clip", "clip-score"), str(models / "clip"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("none", "expected some of psnr, ssim, lpips, dino.*got 'none'"),
        ("psnr=x", "expected NAME=NETWORK for one of lpips, dino.*got 'psnr=x'"),
        ("dino=", "expected NAME=NETWORK"),
        ("fid=", "expected NAME=NETWORK for one of lpips, .*, fid, kid, got 'fid='"),
        ("all", "expected some of psnr, .*fid, kid, glyphs, got 'all'"),
    ],
)
def test_an_unknown_metric_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_metrics([text])


def test_psnr_and_ssim_come_first_and_each_once() -> None:
    assert list(parse_metrics(["dino", "ssim", "dino"])) == ["psnr", "ssim", "dino"]


def test_a_metric_whose_network_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name, **options):
        raise OSError(f"no connection to fetch {name}")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    notes: list[str] = []
    with pytest.raises(ConfigError, match=r"metric dino: cannot load .*no connection .*or leave it out"):
        load("dino", notes=notes)
    assert notes == ["dino needs the weights of facebook/dinov2-base, which are downloaded if missing"]


def test_without_torchmetrics_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=re.escape(f'pip install "{installable("tokenmerge-tools[metrics]")}"')
    ):
        load()


def test_glyphs_counts_pictures_that_show_what_was_asked_for() -> None:
    from PIL import Image

    from tokenmerge_tools.demo.retrieval import SHEET

    first = Image.open(SHEET).crop((0, 0, GRID, GRID))  # a watch
    page = Image.new("RGBA", first.size, "white")
    page.alpha_composite(first)
    prompts = ["a watch on a white background", "an hourglass on a white background"]
    metrics = load("glyphs", prompts=prompts)
    found = metrics.of_pictures[-1].measure([page] * 2, [page] * 2, prompts)
    assert found.tolist() == [1, 0]


def test_figures_are_means_over_all(tmp_path: Path) -> None:
    store = PictureStore(tmp_path / "evaluate.jsonl", {"model": "m", "width": 32, "height": 32, "steps": 4})
    variants = [drawn(), drawn("tome", ratio=0.5)]
    items = [item("a"), item("b"), item("c")]
    for seed, one in enumerate(items):
        for variant, shown in zip(
            variants, (picture(seed), picture(seed if one.prompt == "a" else 9)), strict=True
        ):
            path = store.picture(variant, one)
            path.parent.mkdir(parents=True, exist_ok=True)
            shown.save(path)
    metrics = load()
    measured = measure([items[:2], items[2:]], variants, store, metrics)
    tome = measured["tome ratio=0.5"]
    psnr = tome.columns["psnr"]
    assert psnr[0] == float("inf")
    whole = tome.figures(metrics)
    assert whole.equal == 1
    assert whole.values["psnr"] == pytest.approx(sum(psnr[1:]) / 2)
    assert measured["dense"].figures(metrics).values == {}
    same = measure([items[:1]], variants, store, metrics)["tome ratio=0.5"].figures(metrics)
    assert (same.equal, list(same.values)) == (1, ["ssim"])


def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = PictureStore(tmp_path / "evaluate.jsonl", {"model": "m", "width": 32, "height": 32, "steps": 4})
    path = store.picture(drawn(), item())
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"cannot read the image .*seed0\.png .it is not an image.; delete"):
        measure([[item()]], [drawn()], store, load())
