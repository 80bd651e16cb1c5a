"""Some tests need the servers' code. `make test-serving` runs them, and the main suite skips them."""

from importlib.util import find_spec

collect_ignore_glob = ["servers.py", "test_in_*.py"]

if find_spec("vllm_omni") and find_spec("sglang"):
    import without_gpu

    without_gpu.use()
    collect_ignore_glob = ["test_served.py", "test_many_pictures.py"]
