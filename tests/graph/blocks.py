"""Small blocks, one for each way that code calls norms and activations. At module level, so that
they pickle.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(
    nn.Module
):  # two convolutions, two norms and one shared activation, for the blocks below to call
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)


class Shared(
    Block
):  # one in-place activation module after two norms and after the residual addition
    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.conv1(self.relu(self.bn2(self.conv2(out))))
        out += x
        return self.relu(out)


class Functional(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return F.leaky_relu(self.bn2(self.conv2(x)), 0.3)


class BehindDropout(
    Block
):  # the activation comes after a dropout that depends on the block's own mode
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout2d(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(F.dropout(self.bn1(self.conv1(x)), 0.5, self.training), approximate="tanh")
        return F.silu(self.drop(self.bn2(self.conv2(x))))


class Windows(Block):  # means over windows: one on the way, and the final pooling
    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        return torch.flatten(self.pool(F.relu(self.bn2(self.conv2(x)))), 1)


class TwoConsumers(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        return self.bn2(self.conv2(F.relu(x))) + x


class NormTwice(Block):  # one norm at two places, with another activation each
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return F.silu(self.bn1(self.conv2(x)))


class TrainOnly(Block):  # a second call in train mode, before the call that both modes make
    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        extra = F.relu(self.bn2(self.conv2(x))).mean() if self.training else 0.0
        return F.relu(self.bn1(out)) + extra


class Optional(Block):  # an optional argument that callers pass, and others that they leave out
    def forward(
        self, x: Tensor, shortcut: Tensor | None = None, *rest: Tensor, scale: float = 1.0
    ) -> Tensor:
        if shortcut is None:
            shortcut = x
        x = F.relu(self.bn1(self.conv1(x))) * scale
        return F.relu(self.bn2(self.conv2(x))) + shortcut


class Remembers(
    Block
):  # sets an attribute, and makes a tensor that a graph could only hold as a constant
    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = F.relu(self.bn1(self.conv1(x)))
        return self.last + torch.arange(3.0).sum()


class SamePad(Block):  # padding from the input's size, with conditions on it
    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        pad_height = max(3 - (height % 2), 0) if height % 2 else 1
        pad_width = 2 if int(width) % 2 else 1
        x = self.conv1(F.pad(x, (0, pad_width, 0, pad_height)))
        return self.relu(self.bn1(x))


class Refuses(Block):  # a condition on the input that ends in an error
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 4:
            raise ValueError("4 channels")
        assert x.ndim == 4
        return F.relu(self.bn1(self.conv1(x)))


class PoolsByRank(Block):
    """Returns nothing for a rank that it does not know, as speechbrain's pooling does."""

    def pooled(self, x: Tensor) -> Tensor | None:
        if x.ndim == 4:
            return x.mean((2, 3), keepdim=True)
        return None

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        mean: Any = self.pooled(x)
        return x * mean.sigmoid()


class SetsByRank(Block):
    """Sets a variable for the ranks that it knows alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 4:
            y = self.conv1(x)
        return F.relu(self.bn1(y))


class Branching(nn.Module):  # control flow that depends on the data
    def __init__(self) -> None:
        super().__init__()
        self.block, self.bn = Shared(), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(x)) if x.mean() > 0 else self.block(x)


class AsksTwice(Block):  # one question at two places, which has one answer
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 4:
            channels = x.shape[1]
        y = self.relu(self.bn1(self.conv1(x)))
        return y / channels if x.ndim == 4 else y


class ChangesRank(Block):  # a question whose answer changes, as code changes the value in place
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            x.unsqueeze_(0)
        y = self.relu(self.bn1(self.conv1(x)))
        return y[0] if x.ndim == 3 else y


class Switched(Block):  # two paths, and an argument that leads to another one
    def forward(self, x: Tensor, act: bool = True) -> Tensor:
        x = self.bn1(self.conv1(x if x.ndim == 4 else x[None]))
        return self.relu(x) if act else x


class WithOptions(nn.Module):  # calls three such parts with the argument
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Switched() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, act=False)
        return x


class Iterating(
    nn.Module
):  # a loop over the data, which no trace can follow, around a block that can be traced
    def __init__(self) -> None:
        super().__init__()
        self.block, self.bn, self.act = Shared(), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([sample * 2 for sample in self.act(self.bn(self.block(x)))])


class Custom(Block):  # one activation at two places; timm's SwishMe is a class that fx cannot enter
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.relu = act

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


class Indexed(Block):  # a loop that finds its norms by number; the last step has none
    def __init__(self) -> None:
        super().__init__()
        self.convs, self.norms = (
            nn.ModuleList([self.conv1, self.conv2]),
            nn.ModuleList([self.bn1, self.bn2]),
        )

    def forward(self, x: Tensor) -> Tensor:
        for index in range(len(self.norms)):
            x = self.norms[index](self.convs[index](x))
            x = F.leaky_relu(x, 0.2, inplace=True)
        return x


class Rebinds(Indexed):  # the number of the norm is another one at the activation
    def forward(self, x: Tensor) -> Tensor:
        for index in range(len(self.norms)):
            x = self.norms[index](x)
            index = 1 - index  # noqa: PLW2901  on purpose
            x = F.relu(x)
        return x


class Sequences(nn.Module):  # one activation at several entries of two sequences
    def __init__(self) -> None:
        super().__init__()
        relu = nn.ReLU(inplace=True)
        conv, norm = (lambda: nn.Conv2d(4, 4, 1)), (lambda: nn.BatchNorm2d(4))
        self.first = nn.Sequential(conv(), norm(), relu, conv(), norm(), relu)
        self.second = nn.Sequential(norm(), nn.Sequential(relu, conv()))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Held(Block):  # a function that the block holds in an attribute, and a constant that is one
    def __init__(self) -> None:
        super().__init__()
        self.act, self.slope = F.relu, 0.1

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.bn2(self.conv2(self.act(self.bn1(self.conv1(x))))), self.slope)


class Elsewhere(
    Block
):  # an activation in a function that is no method of the block, and one in a decorated method
    def forward(self, x: Tensor) -> Tensor:
        return self.decorated(activated(self.bn1(self.conv1(x))))

    @torch.enable_grad()
    def decorated(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(x)))


def activated(x: Tensor) -> Tensor:
    return F.relu(x)


class Gate(nn.Module):  # a squeeze-excite with a norm, and a sigmoid gate after a norm
    def __init__(self) -> None:
        super().__init__()
        self.bn, self.fc1, self.bn_se, self.act = (
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 2, 1),
            nn.BatchNorm2d(2),
            nn.SiLU(),
        )
        self.fc2, self.conv = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1)
        self.bn_gate, self.gate = nn.BatchNorm2d(4), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(x)
        weight = self.fc2(self.act(self.bn_se(self.fc1(x.mean((2, 3), keepdim=True)))))
        x = x * weight.sigmoid()
        return x * self.gate(self.bn_gate(self.conv(x)))


class RescaledGate(Gate):  # a squeeze-excite whose operands stand elsewhere than in `Gate`
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(x)
        pooled = self.scale * (1 + 2 * x.mean((2, 3), keepdim=True))
        weight = self.fc2(self.act(self.bn_se(self.fc1(pooled))))
        return torch.mul(x, other=weight.sigmoid())


class Wrapped(nn.Module):
    """An activation in a module of its own, with a buffer, so that a replacement shows in the state
    dict.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class ChannelsLast(nn.Module):
    """BatchNorm of sequences with the channels last, as speechbrain wraps it."""

    def __init__(self, channels: int, moves: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        if self.moves == "permute":
            return self.norm(x.permute(0, 2, 1)).permute(0, 2, 1)
        return self._over_time(x)

    def _over_time(self, x: Tensor) -> Tensor:
        """Normalize images and steps as one dimension; in four, what is reshaped is no channel."""
        shape = x.shape
        if x.ndim == 3:
            x = x.reshape(shape[0] * shape[1], shape[2])
        else:
            x = x.reshape(shape[0] * shape[1], shape[3], shape[2])
        return self.norm(x).reshape(shape)


class Loop(nn.Module):
    """A loop over sequences that end in a norm, as in Tacotron 2."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.convolutions) - 1):
            x = F.dropout(torch.tanh(self.convolutions[i](x)), 0.5, self.training)
        return F.dropout(self.convolutions[-1](x), 0.5, self.training)


class Checks(Block):
    """Checks of its input that end in an error: an assertion, and a `raise` behind a call."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 4, f"{x.shape[1]} channels"
        if not x.shape[2] > 1:
            raise ValueError("too small".upper())
        return F.relu(self.bn1(self.conv1(x)))


class Catches(Block):
    """A check whose error is caught, so that both outcomes are paths."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            if x.shape[1] != 4:
                raise ValueError
        except ValueError:
            return F.relu(self.bn1(x))
        return F.silu(self.bn1(x))
