"""What of a network is trained, and its teacher."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.finetune import training_setup
from retrofit.finetune.recipe import Recipe
from retrofit.networks.open_model import Network
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
    training_setup.adjust_layers(model, Recipe(**{"bn_momentum": 0.9, **settings}), 8, notes.append)
    assert len(notes) == (said is not None), notes
    assert said is None or said in notes[0]


@pytest.mark.parametrize("to", ["bnn", "ln-pn"])
def test_the_teacher_is_the_source(to: str) -> None:
    source = timm.create_model("test_resnet").eval()
    with pytest.raises(RetrofitError, match="needs layers that have a strength"):
        training_setup.source_network(Network(source))
    images = torch.randn(2, 3, 32, 32)
    scores = source(images)
    model, _ = retrofit.convert(source, to, check=False)
    retrofit.set_strength(model, 1.0)
    with pytest.raises(RetrofitError, match="convert the source anew"):
        training_setup.source_network(Network(model))
    teacher = training_setup.source_network(Network(model), resumed=True)
    torch.testing.assert_close(teacher(images), scores, rtol=1e-4, atol=1e-5)
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_only_converted_norms_are_left_to_train() -> None:
    model = converted("ln-pn", ws=True, skip=["layer4"])
    frozen = training_setup.freeze_all_but_norm(model, ["fc.weight"], lambda note: None)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"bn1.weight", "fc.weight"} <= trained
    assert any("proxy_bias" in name for name in trained)
    assert not any("conv" in name and model.get_parameter(name).ndim > 1 for name in trained)
    assert not any(name.startswith("layer4") for name in trained)
    assert frozen == [m for m in model.layer4.modules() if isinstance(m, nn.BatchNorm2d)]
    with pytest.raises(RetrofitError, match="nothing to train"):
        training_setup.freeze_all_but_norm(nn.Linear(2, 2), (), lambda note: None)
