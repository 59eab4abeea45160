"""Callbacks that raise the strength in other people's trainers; each needs its own package, and is imported alone.

    trainer = lightning.Trainer(callbacks=[retrofit.callbacks.LightningStrength(ramp=0.5)])
    trainer = transformers.Trainer(..., callbacks=[retrofit.callbacks.TransformersStrength(ramp=0.5)])

Their arguments are `StrengthSchedule`'s; `total_steps` is the trainer's own unless given. The shape "there-and-back" is
refused: at its turn it needs `retrofit.recentre`, and images.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
