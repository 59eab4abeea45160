"""Fine-tuning: walk a converted network from its old layers to the new ones."""

import lazy_loader

# Lazy: a schedule alone needs no timm.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
