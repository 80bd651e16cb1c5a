from __future__ import annotations

from pathlib import Path

import pytest

from tokenmerge.errors import ConfigError
from tokenmerge_tools.demo.glyphs import asked_for
from tokenmerge_tools.evaluate.prompts import Item, built_in_prompts, items_of, read_prompts


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(tmp_path: Path, content: str) -> list[str]:
    return read_prompts(write(tmp_path, content))


def test_each_line_is_a_prompt_and_repeated_ones_are_read_once(tmp_path: Path) -> None:
    content = "\ufeffa castle\r\n\r\n  a boat, red \na castle\n漢字\n"
    assert texts(tmp_path, content) == ["a castle", "a boat, red", "漢字"]


def test_parti_prompts_are_a_column_of_a_table(tmp_path: Path) -> None:
    content = (
        "Prompt\tCategory\tChallenge\tNote\n"
        '"Go" in neon letters\tWorld Knowledge\tWriting\t\n'
        "a bear\tAnimals\tBasic\tx\n"
        "a cube\t\tBasic\t\n"
    )
    assert read_prompts(write(tmp_path, content)) == [
        '"Go" in neon letters',
        "a bear",
        "a cube",
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\0", "is not UTF-8 text"),
        (b"abc\0def", "is binary"),
        ("Prompt\tCategory\n", "has a header but no prompts"),
        ("Prompt\tCategory\n\tAnimals\n", "has a header but no prompts"),
    ],
)
def test_a_file_without_prompts_is_named(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"prompts\.txt {words}"):
        read_prompts(write(tmp_path, content))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"cannot read {path} .{reason}"):
            read_prompts(path)


def test_a_prompt_that_is_too_long_is_named(tmp_path: Path) -> None:
    for head in ("", "Prompt\tCategory\n"):
        with pytest.raises(
            ConfigError, match=r"prompts\.txt: 'xxx.*expected at most 10,000 .* got 2,000,000"
        ):
            read_prompts(write(tmp_path, f"{head}a pug\n{'x' * 2_000_000}\n"))


def test_a_file_that_is_too_large_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    with path.open("wb") as file:
        file.truncate(2**40)  # a file with a hole, which takes no space
    with pytest.raises(ConfigError, match=r"prompts\.txt \(it has more than 67,108,864 bytes\); give a file"):
        read_prompts(path)


def test_rows_of_other_lengths_are_read(tmp_path: Path) -> None:
    rows = 'Category\tPrompt\nAnimals\ta "pug\nArts\nFood\ta pie\tx\ty\nFood\ta\rb\n'
    prompts = read_prompts(write(tmp_path, rows))
    assert prompts == ['a "pug', "a pie", "a\rb"]


def test_every_prompt_is_drawn_with_every_seed() -> None:
    first, second = "a", "b"
    assert items_of([first, second], [3, 4]) == [
        Item(first, 3),
        Item(first, 4),
        Item(second, 3),
        Item(second, 4),
    ]


def test_the_built_in_prompts_are_what_the_bundled_models_know() -> None:
    prompts = built_in_prompts()
    meant = [asked_for(text) for text in prompts]
    assert len({glyph for glyph, _ in meant}) == len(prompts) == 100
    assert len({background for _, background in meant}) == 10
