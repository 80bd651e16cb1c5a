"""``tokenmerge env``."""

from __future__ import annotations

import json

from tokenmerge_tools.cli import tables
from tokenmerge_tools.cli.arguments import AsJson
from tokenmerge_tools.machine import environment


def env(as_json: AsJson = False) -> None:
    """Show versions, devices, threads and attention back-ends of this machine."""
    found = environment()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        tables.show(tables.environment_table(found))
