"""Records as a benchmark and an evaluation would write them, with figures that are easy to check."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tokenmerge_tools.records.kinds import CellRecord, QualityRecord, SampleRecord

EVIL = """<script>document.title = "broken"</script> "quoted" & $x$ {{ 1 }} | *a*"""


def cell(
    variant: str = "tome",
    seconds: tuple[float, ...] = (2.0, 2.5, 2.2),
    dense: float = 4.4,
    *,
    ratio: float = 0.5,
    status: str = "ok",
    message: str = "",
    settings: dict | None = None,
    facts: dict | None = None,
    peak_bytes: int | None = 3 * 2**30,
    same_attention: float | None = None,
    finished: str = "2026-01-02T03:04:05+00:00",
    **conditions: object,
) -> CellRecord:
    """A cell. ``dense`` is the time of the dense run in each round, with any attention."""
    if settings is None:
        settings = {} if variant == "dense" else {"ratio": ratio}
    values = {
        "model": "geometry:sd15",
        "scope": "pipeline",
        "width": 512,
        "height": 512,
        "frames": None,
        "batch": 1,
        "dtype": "fp16",
        "attention": "sdpa",
        "compile": False,
        "variant": variant,
        "settings": settings,
        "steps": 50,
        "scheduler": None,
        "guidance": None,
        "seed": 0,
        "rounds": 3,
        "warmup": 1,
        "device": "cuda",
        "device_name": "Made GPU",
        "threads": 8,
        "environment": {"versions": {"torch": "2.13.0"}},
        "commit": "abc1234",
    }
    unknown = set(conditions) - set(values)
    assert not unknown, unknown
    references = {"dense": (dense,) * 3, "dense, same attention": (same_attention or dense,) * 3}
    return CellRecord(
        conditions={**values, **conditions},
        status=status,
        message=message,
        seconds=seconds if status == "ok" else (),
        peak_bytes=peak_bytes if status == "ok" else None,
        references=references if status == "ok" else {},
        facts=facts or {},
        finished=finished,
    )


def grid_of_cells() -> list[CellRecord]:
    """Three sizes and ratios, three kinds of attention, a cell out of memory, and one that cannot run."""
    cells = []
    for side, dense in ((512, 4.0), (768, 12.0), (1024, 40.0)):
        size = {"width": side, "height": side}
        cells.append(cell("dense", (dense,) * 3, dense, **size))
        cells.append(cell("dense", (dense * 2,) * 3, dense, attention="default", **size))
        for ratio in (0.25, 0.5, 0.75):
            gain = 1 + ratio * side / 1024
            cells.append(cell("tome", (dense / gain,) * 3, dense, ratio=ratio, **size))
            cells.append(cell("tomesd", (dense / gain * 1.1,) * 3, dense, ratio=ratio, **size))
            cells.append(cell("oracle", (dense / gain * 0.9,) * 3, dense, ratio=ratio, **size))
        cells.append(
            cell("tome", (dense / 1.8,) * 3, dense, settings={"ratio": 0.5, "merge_mlp": True}, **size)
        )
        facts = {"steps_used": 30, "notes": ["30 of 50 steps"]}
        fewer = {"settings": {"as": "tome ratio=0.5"}, "facts": facts}
        cells.append(cell("fewer-steps", (dense * 0.6,) * 3, dense, **fewer, **size))
        cells.append(cell("tome", attention="xformers", status="unavailable", message="no xformers", **size))
    cells.append(cell("dense", status="oom", message="CUDA out of memory", width=1024, height=1024, batch=10))
    return cells


def drawn(**changes: object) -> dict[str, object]:
    """Conditions of images that match those of :func:`cell`."""
    conditions = {
        "steps": 50,
        "attention": "sdpa",
        "scheduler": None,
        "guidance": None,
        "dtype": "fp16",
        "device": "cuda",
        "commit": "abc1234",
        "prompts": {"count": 100, "key": "0123456789abcdef"},
        "seeds": [0],
    }
    return {**conditions, **changes}


def quality() -> list[QualityRecord]:
    """PSNR and FID of two methods at three ratios."""
    return [
        QualityRecord(
            model="geometry:sd15",
            width=512,
            height=512,
            variant=variant,
            settings={"ratio": ratio},
            figures={"psnr": 30 - 10 * ratio - (variant == "tomesd"), "fid": 33 + ratio},
            images=100,
            conditions=drawn(),
        )
        for variant in ("tome", "tomesd")
        for ratio in (0.25, 0.5, 0.75)
    ]


def write_all(folder: Path) -> Path:
    """A results folder with cells, quality and pairs of images."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.jsonl").write_text("".join(c.to_line() for c in grid_of_cells()), encoding="utf-8")
    lines = [record.to_line() for record in quality()]
    for number, prompt in enumerate(("a castle on a hill above a wide river in the evening", EVIL)):
        for ratio in (0.25, 0.5, 0.75):
            sample = SampleRecord(
                prompt=prompt,
                seed=number,
                variant="tome",
                settings={"ratio": ratio},
                dense=f"dense/{number}.png",
                image=f"tome-{ratio}/{number}.png",
            )
            lines.append(sample.to_line())
            _draw(folder / sample.dense, blocks=64)
            _draw(folder / sample.image, blocks=int(64 * (1 - ratio)))
    (folder / "evaluate.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def _draw(path: Path, blocks: int) -> None:
    path.parent.mkdir(exist_ok=True)
    y, x = np.mgrid[0:blocks, 0:blocks] / blocks
    picture = np.stack([x, y, (np.sin(9 * x * y) + 1) / 2], axis=-1)
    Image.fromarray((picture * 255).astype(np.uint8)).resize((256, 256), Image.Resampling.NEAREST).save(path)
