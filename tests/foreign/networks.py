"""Networks of other libraries, small and with random weights, each with example inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, Any]  # a network in evaluation mode, and its `inputs`
NETWORKS: dict[str, Callable[[], Built]] = {}


def image(channels: int = 3, side: int = 64) -> Tensor:
    """Seeded images, a batch of two."""
    return torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def volume() -> Tensor:
    """Seeded volumes of one channel, a batch of two."""
    return torch.randn(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))


def _smp() -> None:
    def unet(decoder: str, encoder: str, side: int = 64) -> Callable[[], Built]:
        def build() -> Built:
            import segmentation_models_pytorch as smp

            return getattr(smp, decoder)(encoder, encoder_weights=None, classes=2), image(side=side)

        return build

    for decoder, encoder in (
        ("Unet", "resnet18"),
        ("Unet", "efficientnet-b0"),
        ("UnetPlusPlus", "mobilenet_v2"),
        ("FPN", "resnet18"),
        ("PSPNet", "resnet18"),
        ("DeepLabV3Plus", "resnet18"),
        ("Linknet", "resnet18"),
        ("MAnet", "resnet18"),
        ("PAN", "resnet18"),
        ("Segformer", "mit_b0"),
        ("UPerNet", "resnet18"),
    ):
        NETWORKS[f"smp {decoder} {encoder}"] = unet(decoder, encoder, 256 if decoder == "PAN" else 64)


def _monai() -> None:
    def net(name: str, x: Callable[[], Tensor], **options: Any) -> Callable[[], Built]:
        def build() -> Built:
            from monai.networks import nets

            return getattr(nets, name)(**options), x()

        return build

    flat = {"spatial_dims": 2, "in_channels": 3, "out_channels": 2}
    strided = {"channels": (8, 16, 32), "strides": (2, 2)}
    for name, x, options in (
        ("BasicUNet", image, {**flat, "features": (8, 8, 16, 16, 32, 8), "norm": "batch"}),
        ("UNet", image, {**flat, **strided, "norm": "BATCH"}),
        ("AttentionUnet", image, {**flat, **strided}),
        ("DenseNet121", image, flat),
        ("SegResNet", image, {**flat, "init_filters": 8}),
        ("EfficientNetBN", image, {"model_name": "efficientnet-b0", "pretrained": False, "num_classes": 4}),
        ("VNet", volume, {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}),
        ("UNet", volume, {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, **strided, "norm": "INSTANCE"}),
        ("HighResNet", volume, {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}),
    ):
        NETWORKS[f"monai {name} {options.get('spatial_dims', 2)}d"] = net(name, x, **options)


def _ultralytics() -> None:
    def yolo(config: str) -> Callable[[], Built]:
        def build() -> Built:
            from ultralytics import YOLO

            return YOLO(config, verbose=False).model, image()

        return build

    for config in ("yolov8n", "yolov8n-seg", "yolov8n-cls", "yolo11n", "yolov5n"):
        NETWORKS[f"ultralytics {config}"] = yolo(f"{config}.yaml")


def _kornia() -> None:
    def feature(name: str, x: Callable[[], Any], **options: Any) -> Callable[[], Built]:
        def build() -> Built:
            from kornia import feature as library

            return getattr(library, name)(**options), x()

        return build

    for name in ("HardNet", "SOSNet", "HyNet"):
        NETWORKS[f"kornia {name}"] = feature(name, lambda: image(1, 32), pretrained=False)


def _transformers() -> None:
    def network(name: str, x: Callable[[], Any] = image, config: str = "", **options: Any) -> Callable[[], Built]:
        def build() -> Built:
            import transformers

            made = getattr(transformers, config or f"{name}Config")(**options)
            cls = name if config else f"{name}Model"
            return getattr(transformers, cls)(made), x()

        return build

    def tokens() -> dict[str, Tensor]:
        ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def waveform() -> Tensor:
        return torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))

    small = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
    vit = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    for name, x, options in (
        ("ResNet", image, {**small, "embedding_size": 8, "layer_type": "basic"}),
        ("RegNet", image, {**small, "embedding_size": 8, "groups_width": 8}),
        ("MobileNetV1", image, {"depth_multiplier": 0.25}),
        ("MobileNetV2", image, {"depth_multiplier": 0.35}),
        ("EfficientNet", image, {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640}),
        ("ConvNextV2", image, {**small, "image_size": 64}),
        ("PoolFormer", image, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
        ("Segformer", image, {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 1, 2, 2]}),
        ("Levit", lambda: image(3, 224), {"depths": [1, 1, 1], "hidden_sizes": [32, 48, 64]}),
        ("Bit", image, {**small, "embedding_size": 16, "num_groups": 4}),
        ("ViT", image, {**vit, "image_size": 64, "patch_size": 16}),
        ("Swin", image, {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}),
        ("Bert", tokens, {**vit, "vocab_size": 64}),
        ("Wav2Vec2", waveform, {**vit, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2),
                                "num_feat_extract_layers": 2, "num_conv_pos_embedding_groups": 4}),
    ):  # fmt: skip
        NETWORKS[f"transformers {name}"] = network(name, x, **options)


for _library in (_smp, _monai, _ultralytics, _kornia, _transformers):
    _library()


def build(name: str) -> Built:
    """Build a network from the same random numbers each time, its running statistics moved."""
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        model, inputs = NETWORKS[name]()
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if getattr(module, "running_var", None) is not None:
            module.running_mean.copy_(0.2 * torch.randn(module.running_mean.shape, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
    return model.eval().float(), inputs
