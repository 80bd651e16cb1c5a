"""The parts of ``benchmarks/gpu.py``: the record, the clock, models, variants, measurements and tables."""
