"""The formulas as Triton kernels: for CUDA, and for Triton's interpreter on the CPU
(TRITON_INTERPRET=1).

A kernel goes over a tensor in tiles. A tile has runs along its first axis and neighbouring
elements, lanes, along its second. Sets lie in one of three ways (`triton_plan.py`):

- columns: a lane is a set, or some neighbouring lanes are, and its elements lie along the runs;
- stretches: a set is all lanes of its runs;
- rows: a set is one run, which fits a tile; a tile holds several sets.

Where sets are few and large, several programs share one. Each stores partial sums, and the last of
them to finish adds them up, always in the same order: no result depends on which program comes
first. Tables hold a number a set, a row a field. What stands in capitals and is no pointer is a
constant to Triton's compiler. Arguments of a launch are flat: the launcher is slow with tuples.

Device functions, from the bottom: `arithmetic` and `psi` are of numbers; `tables`, `tiles`, `sums`
and `affine` say where numbers lie; `activations` are phi. Above them are files with kernels and
what launches them: `norm_forward` and `norm_backward` for normality normalization, `norm_result`
for its result by constants too; `maps`, `migration` and `proxy` for maps by a scale and a shift.
"""

from retrofit.layers.kernels.triton import launcher
from retrofit.layers.kernels.triton.launcher import fault
from retrofit.layers.kernels.triton.maps import ChannelMapOnGPU, channel_plan
from retrofit.layers.kernels.triton.migration import MigratedNormOnGPU, input_of, migrate
from retrofit.layers.kernels.triton.norm_backward import backward
from retrofit.layers.kernels.triton.norm_forward import forward
from retrofit.layers.kernels.triton.norm_result import apply
from retrofit.layers.kernels.triton.proxy import Proxy, ProxyActivationOnGPU

READS_STRENGTH = True

__all__ = [
    "READS_STRENGTH",
    "ChannelMapOnGPU",
    "MigratedNormOnGPU",
    "Proxy",
    "ProxyActivationOnGPU",
    "apply",
    "backward",
    "channel_plan",
    "fault",
    "forward",
    "input_of",
    "launcher",
    "migrate",
]
