"""Write golden.npz: plans of the PyTorch code, which NumPy and Paddle must reproduce.

Run from the repository: python tests/integrations/portable/write_golden.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from planned import plan_by

from tokenmerge import ToMeConfig
from tokenmerge.integrations.portable import step_number

GOLDEN = Path(__file__).parent / "golden.npz"
SEED, TIMESTEP, BATCH, CHANNELS = 3, 481.0, 2, 4
GRIDS = ((16, 16), (17, 13), (4, 70))


def golden() -> dict[str, np.ndarray]:
    """Features, plans and merged features by name."""
    arrays = {}
    for rows, columns in GRIDS:
        grid = f"{rows}x{columns}"
        features = np.random.default_rng(rows).standard_normal((BATCH, rows * columns, CHANNELS))
        arrays[grid] = features.astype(np.float32)
        x = torch.from_numpy(arrays[grid]).double()
        for planner in ("tome", "uniform"):
            config = ToMeConfig(ratio=0.5, planner=planner, seed=SEED)
            plan = plan_by(planner, x, (1, rows, columns), config, torch.tensor(step_number(TIMESTEP)))
            for field in ("keep", "sources", "targets", "inverse", "sizes"):
                arrays[f"{grid} {planner} {field}"] = getattr(plan, field).numpy().astype(np.int16)
            arrays[f"{grid} {planner} merged"] = plan.merge(x.float()).numpy()
    return arrays


if __name__ == "__main__":
    np.savez_compressed(GOLDEN, **golden())
