"""The lines that ``break_lines.py`` breaks are in the library, so that it runs when tests are taken away."""

import break_lines

import tokenmerge


def test_every_line_to_break_is_there_once():
    assert len(break_lines.BREAKS) == 10
    for edit in break_lines.BREAKS:
        assert break_lines.source(break_lines.Path(tokenmerge.__file__).parent, edit)
