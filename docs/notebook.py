"""Run docs/notebook.ipynb from top to bottom, and store its outputs.

python docs/notebook.py          # needs nbclient and ipykernel, which `make docs` installs
"""

from __future__ import annotations

import base64
import io
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

PAGE = Path(__file__).parent / "notebook.ipynb"


def main() -> None:
    """Run and write. Progress bars, warnings of libraries and images in a second format are not stored."""
    notebook = nbformat.read(PAGE, as_version=4)
    NotebookClient(notebook, kernel_name="python3", coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of this run
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                data = output.get("data", {})
                data.pop("image/jpeg", None)
                if "image/png" in data:
                    data["image/png"] = small(data["image/png"])
    nbformat.write(notebook, PAGE)


def small(picture: str) -> str:
    """Return an image in base64 with a palette, which takes a third of the space."""
    file = io.BytesIO()
    opened = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    opened.quantize(128, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    main()
