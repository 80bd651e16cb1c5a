"""The bits of a number, also found by arithmetic alone."""

from __future__ import annotations

import torch

from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.exported_arithmetic import ExportedArithmetic


def test_bits_found_by_arithmetic_are_those_in_memory():
    """Exactly, since an exported program must draw the same places as PyTorch."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 0x7F800000, (100_000,), generator=generator, dtype=torch.int32)
    edges = [0.0, 1e-45, 1.1754942e-38, 2.0**-126, 0.5, 1.0, 2.0, 981.0, 999.0, 1000.0, 3.4028235e38]
    values = torch.cat([patterns.view(torch.float32), torch.tensor(edges)])
    for signed in (values, -values[values > 0]):
        assert torch.equal(ExportedArithmetic().bits(signed), signed.view(torch.int32).to(torch.int64))
        assert torch.equal(arithmetic().bits(signed), ExportedArithmetic().bits(signed))
