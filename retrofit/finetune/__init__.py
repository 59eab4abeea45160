"""Fine-tuning: walk a converted network from its old layers to the new ones."""

from retrofit.utils.extras import lazy_names

# Lazy: a schedule alone needs no timm.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
