"""``python -m tokenmerge_tools``, and ``accelerate launch -m tokenmerge``."""

import sys

from tokenmerge_tools.cli import main

sys.exit(main())
