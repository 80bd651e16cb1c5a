"""Where Paddle is not installed."""

import subprocess
import sys

import pytest

from tokenmerge import MissingExtraError
from tokenmerge.origin import installable


@pytest.mark.parametrize("missing", ["paddle", "ppdiffusers"])
def test_importing_the_paddle_room_names_the_extra_and_the_tested_versions(missing):
    script = f"import sys; sys.modules[{missing!r}] = None; import tokenmerge.paddle"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert MissingExtraError.__name__ in last
    assert f'pip install "{installable("tokenmerge[paddle]")}"' in last
    assert "paddlepaddle 3.3.1 and ppdiffusers 0.29.0" in last
