"""What a recipe sets in the layers, and which of them are trained."""

from typing import Any

import pytest
from torch import nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.finetune import layer_settings
from retrofit.finetune.recipe import Recipe
from tests.finetune.conftest import small_network
from tests.finetune.test_optimization import converted


@pytest.mark.parametrize(
    ("to", "settings", "said"),
    [
        *(
            (None, {}, "this is plain training"),
            ("ln", {"precise_bn": 8}, "`precise_bn` does nothing"),
        ),
        *(("bnn", {}, None), ("bnn", {"noise": 0.4, "noise_kind": "unscaled"}, None)),
        ("gn", {"noise": 0.4}, "no layer of the network draws noise"),
        (
            "bnn",
            {"model_ema": True},
            "by 0.0002 a step, so after 8 steps 100% of it are those of the first; lower `model_",
        ),
        ("bnn", {"model_ema": True, "model_ema_decay": 0.6}, None),
        (
            "bnn",
            {"bn_momentum": 0.01},
            "after 8 batches 92% of them are those from before; raise `bn_momentum`",
        ),
        (
            "bnn",
            {"strength_sched": "off"},
            "layers stand at strength 0.0253",
        ),  # as an average of weights leaves it
    ],
    ids=str,
)
def test_settings_that_do_nothing_are_said(
    to: str | None, settings: dict[str, Any], said: str | None
) -> None:
    model, notes = small_network(to).model, list[str]()
    if to == "bnn":
        retrofit.set_strength(model, 0.02531)
    layer_settings.adjust_layers(model, Recipe(**{"bn_momentum": 0.9, **settings}), 8, notes.append)
    assert len(notes) == (said is not None), notes
    assert said is None or said in notes[0]


def test_only_converted_norms_are_left_to_train() -> None:
    model = converted("ln-pn", ws=True, skip=["layer4"])
    frozen = layer_settings.freeze_all_but_norm(model, ["fc.weight"], lambda note: None)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"bn1.weight", "fc.weight"} <= trained
    assert any("proxy_bias" in name for name in trained)
    assert not any("conv" in name and model.get_parameter(name).ndim > 1 for name in trained)
    assert not any(name.startswith("layer4") for name in trained)
    assert frozen == [m for m in model.layer4.modules() if isinstance(m, nn.BatchNorm2d)]
    with pytest.raises(RetrofitError, match="nothing to train"):
        layer_settings.freeze_all_but_norm(nn.Linear(2, 2), (), lambda note: None)
