"""Run docs/notebook.ipynb from top to bottom, and store its outputs.

python docs/notebook.py          # needs nbclient and ipykernel, which `make docs` installs
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

PAGE = Path(__file__).parent / "notebook.ipynb"


def main() -> None:
    """Run and write. Progress bars, warnings of libraries and pictures in a second format are not stored."""
    notebook = nbformat.read(PAGE, as_version=4)
    NotebookClient(notebook, kernel_name="python3", coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of this run
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                output.get("data", {}).pop("image/jpeg", None)
    nbformat.write(notebook, PAGE)


if __name__ == "__main__":
    main()
