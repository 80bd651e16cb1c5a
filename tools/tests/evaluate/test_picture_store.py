from __future__ import annotations

from pathlib import Path

from tools.tests.evaluate.conftest import drawn, item

from tokenmerge_tools.evaluate.picture_store import PictureStore

CONDITIONS = {"model": "owner/name", "width": 64, "height": 32, "steps": 4}


def store(**changes: object) -> PictureStore:
    return PictureStore(Path("results/evaluate.jsonl"), {**CONDITIONS, **changes})


def test_names_tell_people_what_they_are() -> None:
    path = store().picture(drawn("tome", ratio=0.5), item("A red apple!", seed=3))
    assert path.parts[:2] == ("results", "evaluate")
    assert path.parts[2].startswith("name-64x32-4-steps-")
    assert path.parts[3].startswith("tome-ratio-0-5-")
    assert path.name.startswith("a-red-apple-")
    assert path.name.endswith("-seed3.png")
    assert store().picture(drawn(), item()).parent.name == "dense"
    assert store().relative(path) == path.as_posix().removeprefix("results/")


def test_whatever_is_drawn_otherwise_has_another_name() -> None:
    long = "a very long prompt that goes on and on until names are cut off "
    variants = [
        drawn(),
        drawn("tome", ratio=0.5),
        drawn("tome", ratio=0.5, merge_mlp=True),
        drawn("tome", ratio=0.12345678),
        drawn("tome", ratio=0.12345679),
        drawn("tomesd", ratio=0.5),
        drawn("fewer-steps", steps=2),
        drawn("fewer-steps", steps=3),
    ]
    items = [item(long + "here"), item(long + "there"), item(long + "here", seed=1), item("a/b"), item("a b")]
    stores = [store(), store(steps=5), store(width=32), store(model="other/name"), store(dtype="fp16")]
    paths = {str(place.picture(v, i)) for place in stores for v in variants for i in items}
    assert len(paths) == len(stores) * len(variants) * len(items)
