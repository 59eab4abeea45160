"""Importing this registers with Opacus (1.6) what it asks of layers: validators, fixers and samplers of gradients.

    import retrofit.opacus
    model = ModuleValidator.fix(model)            # BatchNorm keeps its trained function: see `fix_batch_norm`
    model, optimizer, loader = PrivacyEngine().make_private(module=model, ...)

- The validator refuses what mixes the samples of a batch: bnn, dbn, dbnn, and timm's BatchNormAct2d.
- GradSampleModule takes batch-independent converted networks as they are, at any strength, in mode "hooks". In modes
  "functorch" and "ew" it takes what `retrofit.plain` makes of them, and what the fixer makes of BatchNorm.

Running statistics are constants here, part of the model that training starts from: that model must not have seen the
private data.
"""

from retrofit.opacus import fixers, samplers, validators

__all__ = ["fixers", "samplers", "validators"]
