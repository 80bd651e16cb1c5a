"""``python -m tokenmerge``, and ``accelerate launch -m tokenmerge``."""

import sys

from tokenmerge.cli import main

sys.exit(main())
