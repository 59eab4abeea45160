"""Import this to prepare Opacus (1.6) for the layers: it registers validators, a fixer and
per-sample gradients.

    import retrofit.opacus
    print(retrofit.opacus.check(model, images))   # is each sample's gradient its own?
    model = ModuleValidator.fix(model)            # BatchNorm keeps its trained function
    model, optimizer, loader = PrivacyEngine().make_private(module=model, ...)

- The validator refuses layers that mix the samples of a batch, trained or not: BatchNorm in
  training, bnn, dbn, dbnn.
- GradSampleModule accepts batch-independent converted networks as they are, at any strength, in
  mode "hooks". Modes "functorch" and "ew" accept them after `retrofit.plain`, and accept the layers
  that the fixer puts in for BatchNorm.

Running statistics are constants here. They are part of the model that training starts from, and
that model must not have seen the private data.
"""

from retrofit.opacus import gradients, opacus_validators
from retrofit.opacus.batch_dependence import BatchDependence, check
from retrofit.opacus.fixer import fix_batch_norm

__all__ = ["BatchDependence", "check", "fix_batch_norm", "gradients", "opacus_validators"]
