"""A network of a user's own, with the layers that no small classifier of timm or torchvision holds."""

from __future__ import annotations

from torch import Tensor, nn


class Own(nn.Module):
    """GroupNorm, and InstanceNorm with and without running statistics; each is followed by an activation."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, 2), nn.GroupNorm(2, 8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.conv3, self.norm3 = nn.Conv2d(8, 16, 3, 2, bias=False), nn.InstanceNorm2d(16, affine=True)
        self.conv4, self.norm4 = nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16)
        self.relu, self.silu = nn.ReLU(), nn.SiLU()
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.conv1(x)))
        x = self.relu(self.norm2(self.conv2(x)))
        x = self.silu(self.norm3(self.conv3(x)))
        x = self.relu(self.norm4(self.conv4(x)))
        return self.head(x.mean((2, 3)))


def build(num_classes: int = 3, img_size: int = 32) -> Own:
    model = Own(num_classes)
    model.pretrained_cfg = {"input_size": (3, img_size, img_size), "crop_pct": 1.0}
    return model
