"""The plans in golden.npz, which the tests on Paddle compare with, are those of the PyTorch code."""

import runpy
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def test_golden_plans_are_those_of_torch():
    with np.load(HERE / "golden.npz") as written:
        made = runpy.run_path(str(HERE / "write_golden.py"))["golden"]()
        assert set(written) == set(made)
        for name, array in made.items():
            if name.endswith("merged"):
                # Sums of a few float32 numbers near 1, which another version of PyTorch may add in another
                # order.
                np.testing.assert_allclose(written[name], array, atol=1e-6, rtol=0)
            else:
                np.testing.assert_array_equal(written[name], array)
