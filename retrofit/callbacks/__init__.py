"""Callbacks that raise the strength in third-party trainers; each needs its own package and is
imported separately.

    trainer = lightning.Trainer(callbacks=[retrofit.callbacks.LightningStrength(ramp=0.5)])
    callback = retrofit.callbacks.TransformersStrength(ramp=0.5)
    trainer = transformers.Trainer(..., callbacks=[callback])

Their arguments are `StrengthSchedule`'s; `total_steps` defaults to the trainer's own. The shape
"there-and-back" is refused, because at the turn it needs `retrofit.recentre`, and images.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
