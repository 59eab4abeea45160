"""The targets of a conversion: importing this package registers them all."""

# In the order in which `to` lists them.
from retrofit.surgery.targets import normality  # isort: split

from retrofit.surgery.targets import batch_independent  # isort: split

from retrofit.surgery.targets import frozen  # isort: split

from retrofit.surgery.targets import decorrelated  # isort: split

from retrofit.surgery.targets import baselines

__all__ = ["baselines", "batch_independent", "decorrelated", "frozen", "normality"]
