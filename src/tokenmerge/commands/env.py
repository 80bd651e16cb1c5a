"""``tokenmerge env``."""

from __future__ import annotations

import json

from tokenmerge.bench.env import environment
from tokenmerge.commands import tables
from tokenmerge.commands.arguments import AsJson

__all__ = ["env"]


def env(as_json: AsJson = False) -> None:
    """Show versions, devices, threads and the attention back-ends found here."""
    found = environment()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        tables.show(tables.environment_table(found))
