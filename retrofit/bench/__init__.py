"""What networks cost: time and peak memory of evaluation and training, against each other."""

from retrofit.bench.cost import Cost, Setting, Spread, measure, peak_memory

__all__ = ["Cost", "Setting", "Spread", "measure", "peak_memory"]
