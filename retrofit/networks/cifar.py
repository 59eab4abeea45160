"""ResNet-18 for pictures of 32 px, as the code of Eftekhari & Papyan (2025) has it: a 3x3 stem and
no pooling.

For the command line it is `py:retrofit.networks.cifar:resnet18`.
"""

import timm
from torch import nn


def resnet18(num_classes: int = 10, in_chans: int = 3) -> nn.Module:
    """Return timm's resnet18 behind a 3x3 convolution of stride 1, without max-pooling: the last
    map of 32 px is 4x4.

    The first weights are He's with fan-out, and no residual branch starts at zero, as in the
    authors' code.
    """
    model = timm.create_model(
        "resnet18", num_classes=num_classes, in_chans=in_chans, zero_init_last=False
    )
    model.conv1 = nn.Conv2d(in_chans, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model
