"""Small networks that several of the tests here convert."""

from torch import Tensor, nn
from torch.nn import functional as F


def trained(model: nn.Module, low: float = 0.5) -> nn.Module:
    """Give norms values that training could have left there, gamma from `low`; return the network
    in evaluation.
    """
    ranges = {
        "running_mean": (-0.5, 0.5),
        "running_var": (0.5, 2.0),
        "weight": (low, 1.5),
        "bias": (-0.3, 0.3),
    }
    for module in model.modules():
        for name in ranges if "Norm" in type(module).__name__ else ():
            if getattr(module, name, None) is not None:
                getattr(module, name).data.uniform_(*ranges[name])
    return model.eval()


def mixed() -> nn.Module:  # a layer of each family that has a normality-normalized counterpart
    norms = nn.BatchNorm2d(8), nn.ReLU(), nn.Sequential(nn.GroupNorm(2, 8), nn.InstanceNorm2d(8))
    return nn.Sequential(nn.Conv2d(3, 8, 3), *norms, nn.Flatten(2), nn.LayerNorm(36))


class Shared(
    nn.Module
):  # one in-place activation for two norms and a sum, a functional one, and a norm without any
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.bn4 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(me, x: Tensor) -> Tensor:  # noqa: N805
        y = me.relu(me.bn1(me.conv(x)))
        z = F.relu6(me.bn2(y * 2 - 1))
        z = me.relu(me.bn4(z * 2 - 1))
        return me.relu(me.bn3(y) + z)
