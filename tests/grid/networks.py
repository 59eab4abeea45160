"""A network of a user's own, with the layers that no small classifier of timm or torchvision
holds.
"""

from torch import nn


def build(num_classes: int = 3, img_size: int = 32) -> nn.Module:
    """GroupNorm, and InstanceNorm with and without running statistics; each is followed by an
    activation.
    """
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2), nn.GroupNorm(2, 8), nn.ReLU()),
        *(
            nn.Conv2d(8, 8, 3),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            nn.ReLU(),
        ),
        *(nn.Conv2d(8, 16, 3, 2, bias=False), nn.InstanceNorm2d(16, affine=True), nn.SiLU()),
        *(nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)),
    )
    model.num_classes, model.pretrained_cfg = (
        num_classes,
        {"input_size": (3, img_size, img_size), "crop_pct": 1.0},
    )
    return model
