"""The names of the planners and their properties, read from their files without importing torch.

A planner's file has those of the following lines that are true of the planner:

- ``GUIDED = True``: it looks at what guidance changed in the last step, and plans as "tome" before that.
- ``OWN_NUMBER = True``: it may remove another number of tokens than it is asked to.
- ``OVER_TIME = True``: its cells may reach over several frames of a video.
- ``COMPARES_NOTHING = True``: the values of the tokens are not used.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "planners"


def texts_in(folder: Path) -> dict[str, str]:
    """Name → text of each planner in a folder. A planner is a file ``x.py`` with the function ``plan_x``."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))}
    return {name: text for name, text in texts.items() if f"\ndef plan_{name}(" in text}


def _that_say(line: str) -> tuple[str, ...]:
    """Return names of the planners whose files have this line."""
    return tuple(sorted(name for name, text in _TEXTS.items() if f"\n{line}\n" in text))


_TEXTS = texts_in(_FOLDER)
PLANNERS = tuple(_TEXTS)
GUIDED_PLANNERS = _that_say("GUIDED = True")
OWN_NUMBER = _that_say("OWN_NUMBER = True")
OVER_TIME = _that_say("OVER_TIME = True")
COMPARES_NOTHING = _that_say("COMPARES_NOTHING = True")
