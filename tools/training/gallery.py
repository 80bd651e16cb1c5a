"""Draw the thumbnails by which `tokenmerge_tools.demo.retrieval` recognises glyphs.

python -m tools.training.gallery
"""

from __future__ import annotations

import typer
from PIL import Image
from tools.training.glyphs import draw

from tokenmerge_tools.demo.glyphs import read_glyphs
from tokenmerge_tools.demo.retrieval import COLUMNS, GRID, SHEET


def main() -> None:
    """Draw every glyph, on nothing, in the order of the list."""
    glyphs = read_glyphs()
    sheet = Image.new("RGBA", (COLUMNS * GRID, -(-len(glyphs) // COLUMNS) * GRID))
    for i, glyph in enumerate(glyphs):
        # Pillow averages colours by their opacity, so that a thumbnail laid on a background is the average of
        # the large glyph laid on it.
        thumbnail = draw(glyph, 4 * GRID).resize((GRID, GRID), Image.Resampling.BOX)
        sheet.paste(thumbnail, (i % COLUMNS * GRID, i // COLUMNS * GRID))
    sheet.save(SHEET, optimize=True)
    typer.echo(f"{SHEET}: {len(glyphs)} glyphs, {SHEET.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    typer.run(main)
