from .lightning import LightningStrength as LightningStrength
from .transformers import TransformersStrength as TransformersStrength
