"""These tests need Triton, which `make test-triton` installs, so the main suite skips them.

Triton decides as it is imported whether its interpreter runs the kernels, so there are two runs.
"""

import os

from tokenmerge.ops import kernels

if not kernels.ON:
    collect_ignore_glob = ["*.py"]
elif os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_compiled.py"]
else:
    collect_ignore_glob = ["test_interpreted.py"]
