"""``python -m tokenmerge_tools``."""

import sys

from tokenmerge_tools.cli import main

sys.exit(main())
