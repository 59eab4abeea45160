from . import callbacks, layers
from .baking import bake
from .conversion_options import register_target
from .errors import RetrofitError, UsageError
from .export import export_onnx, fold
from .layers.norm_classes import NORMS
from .networks.artifact import load, save
from .networks.hub import push_to_hub, save_for_hub
from .record import Preprocess
from .running_statistics import freeze_norms, recentre, sync_norms, update_bn
from .surgery import convert, plan, set_strength, strength_of
from .surgery.plain import plain

__version__: str
__all__ = [
    "NORMS",
    "Preprocess",
    "RetrofitError",
    "UsageError",
    "__version__",
    "bake",
    "callbacks",
    "convert",
    "export_onnx",
    "fold",
]
__all__ += [
    "freeze_norms",
    "layers",
    "load",
    "plain",
    "plan",
    "push_to_hub",
    "recentre",
    "register_target",
    "save",
    "save_for_hub",
]
__all__ += ["set_strength", "strength_of", "sync_norms", "update_bn"]
