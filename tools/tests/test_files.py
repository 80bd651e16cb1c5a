from __future__ import annotations

import math
import os

import pytest
from tools.tests.small_files import small_files

from tokenmerge.errors import ConfigError
from tokenmerge_tools.files import (
    free_folder,
    open_picture,
    prepare_folder,
    read_bytes,
    slug,
    write_atomically,
    write_json,
    write_text,
)
from tokenmerge_tools.pipelines.settings import check_size, parse_size


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A red apple, on a table!", "a-red-apple-on-a-table"),
        ("../../etc/passwd", "etc-passwd"),
        ("ein Äpfelchen", "ein-äpfelchen"),
        ("???", "picture"),
        ("word " * 20, "word-word-word-word-word-word-word-word"),
        ("a grinning face on a light blue background", "a-grinning-face-on-a-light-blue"),  # whole words
        ("w" * 50, "w" * 40),
    ],
)
def test_a_slug_is_a_harmless_folder_name(prompt, name):
    assert slug(prompt) == name


def test_a_free_folder_never_exists(tmp_path):
    for name in ("apple", "apple-2", "apple-3"):
        assert free_folder(tmp_path, "apple") == tmp_path / name
        (tmp_path / name).mkdir()


def test_a_folder_is_made_with_its_parents_and_left_empty(tmp_path):
    prepare_folder(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out: cannot write to .*file .*--out"):
        prepare_folder(tmp_path / "file")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"seconds": 1.5})

    def fail(unfinished):
        unfinished.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert path.read_text() == '{\n  "seconds": 1.5\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_in_one_step_never_written_over(tmp_path):
    path, link = tmp_path / "run.json", tmp_path / "reader"
    write_json(path, {"run": 1})
    link.hardlink_to(path)  # stands for a reader that has the old file open
    write_json(path, {"run": 2})
    assert '"run": 1' in link.read_text()
    assert '"run": 2' in path.read_text()


def test_json_holds_no_number_that_other_readers_refuse(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "run.json", {"psnr": math.inf})


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    return tmp_path / "pipe.png"


def test_what_is_no_regular_file_is_neither_read_nor_replaced(pipe):
    for read in (read_bytes, open_picture):
        with pytest.raises(
            ConfigError, match=rf"prompts: cannot read {pipe} \(it is not a regular file\); x"
        ):
            read(pipe, "prompts", "x")
    with pytest.raises(ConfigError, match=r"out: cannot write .*it is not a regular file"):
        write_text(pipe, "text")
    assert pipe.is_fifo()


def test_a_disk_that_is_full_is_one_line_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "run.json"
    write_text(path, "old")
    with small_files(100), pytest.raises(ConfigError, match=r"out: cannot write .*File too large.*free some"):
        write_text(path, "x" * 1000)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"GIF", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_what_is_no_picture_is_one_line(tmp_path, content):
    path = tmp_path / "edges.png"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"control: cannot read the image .*edges.png .it is not an image"):
        open_picture(path, "control", "give another")


@pytest.mark.parametrize(
    ("text", "size"), [("512", (512, 512)), ("768x512", (768, 512)), (" 8 X 16 ", (8, 16)), ("8×16", (8, 16))]
)
def test_sizes_are_width_then_height(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "nan", "0", "512x0", "-512", "512x", "x512", "512x512x3", "5.5"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="size: expected WIDTHxHEIGHT") as raised:
        parse_size(text)
    assert repr(text) in str(raised.value)


def test_a_size_must_fit_the_latents():
    assert check_size((768, 512), 8) == (96, 64)
    with pytest.raises(ConfigError, match="multiples of 8 pixels, got 770x3; use 768x8"):
        check_size((770, 3), 8)
