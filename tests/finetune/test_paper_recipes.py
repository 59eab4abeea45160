"""Every recipe's network, built on the meta device by the command in its header, is what the paper says of it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

import pytest
import timm
import torch
from torch import nn

from retrofit.cli.convert import command
from retrofit.conversion_options import OPTIONS
from retrofit.finetune.optim import build_optimizer
from retrofit.finetune.recipe import load_recipe
from retrofit.finetune.recipe_files import recipe_summaries, recipe_text
from retrofit.layers import ProxyNorm
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.networks.cifar import resnet18
from retrofit.surgery import apply, plan


@dataclass(frozen=True)
class Said:
    """What holds of a recipe's network and optimizer."""

    converted: tuple[int, int]  # norms, and how many there are
    last_map: tuple[int, int]  # sides of what the classifier pools; or, of a ViT, its tokens and features
    decay: str  # of "all" parameters; of "weights" of convolutions, linear layers and ProxyNorm
    eps: float | None  # the optimizer's, None where it has none
    proxied: tuple[int, int] = (0, 0)  # activations, and how many there are
    standardized: tuple[int, int] = (0, 0)  # convolutions, and how many of them have a scale


SAID = {
    "cifar10": [Said((20, 20), (4, 4), "all", None)],
    "cifar10-vit": [Said((17, 17), (65, 768), "all", 1e-8)],
    "digits": [],
    "imagenet-bnn-resnet50": [Said((53, 53), (7, 7), "weights", None)],
    "imagenet-gn-pn-efficientnet": [Said((49, 49), (7, 7), "weights", 1e-3, proxied=(33, 65))],  # 32 in SE
    "imagenet-gn-pn-resnet50": [Said((49, 49), (7, 7), "all", None, proxied=(49, 49))],
    "imagenet-gn-ws-pn-resnet50": [
        Said((49, 49), (7, 7), "all", None, proxied=(49, 49), standardized=(53, 16)),
        Said((49, 49), (7, 7), "all", None, standardized=(53, 16)),
        Said((49, 49), (7, 7), "all", None, proxied=(49, 49)),
    ],
    "imagenet-lnn-vit": [Said((25, 25), (197, 384), "weights", 1e-8)],
    "imagenet-rivals-efficientnet": [
        Said((49, 49), (7, 7), "weights", 1e-3),
        Said((49, 49), (7, 7), "weights", 1e-3),
    ],
    "quick-recover": [Said((53, 53), (7, 7), "weights", 1e-8, proxied=(33, 49))],
}


def commands(name: str) -> list[list[str]]:
    """The arguments of `retrofit convert` in a recipe's header."""
    lines = [line.removeprefix("#") for line in recipe_text(name).splitlines() if line.startswith("#")]
    text = re.sub(r"\\\n", "", "\n".join(lines))
    text = re.sub(r"  +(GN\S*|Evo\S*)$", "", text, flags=re.MULTILINE)
    return [shlex.split(line)[2:] for line in text.splitlines() if line.strip().startswith("retrofit convert ")]


def network(arguments: list[str]) -> tuple[nn.Module, dict[str, object], tuple[int, int, int]]:
    """What `retrofit convert` would start from, on the meta device, its options, and the size of an image."""
    given = command.make_context("convert", list(arguments)).params
    kwargs = {**dict(given["model_kwargs"] or ()), **{k: given[k] for k in ("num_classes",) if given[k]}}
    side = given["img_size"] or 224
    with torch.device("meta"):
        if str(given["model"]).startswith("py:retrofit.networks.cifar:resnet18"):
            return resnet18(), given, (3, side, side)
        if "vit" in given["model"]:
            kwargs["img_size"] = side
        return timm.create_model(given["model"], **kwargs), given, (3, side, side)


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, said in SAID.items() for i in range(len(said))])
def test_the_network_and_its_optimizer_are_what_the_paper_says(name: str, number: int) -> None:
    said, found = SAID[name][number], commands(name)
    assert len(found) == len(SAID[name])
    model, given, size = network(found[number])
    with torch.no_grad():
        features = model.eval().forward_features(torch.empty(1, *size, device="meta"))
    assert features.shape[-2:] == said.last_map
    options = {key: given[key] for key in OPTIONS if given.get(key) is not None}
    made = plan(model, str(given["to"]), **options)
    counts = made.counts
    assert (counts["converted"], sum(counts.values())) == said.converted
    model, _ = apply(made, model)
    activations = [row for row in made.edits if row.kind == "activation"]
    proxied = sum(isinstance(module, ProxyNorm) for module in model.modules())
    if said.proxied[1]:
        assert (proxied, len(activations)) == said.proxied
    standard = [module for module in model.modules() if isinstance(module, WeightStandardization)]
    assert (len(standard), sum(module.scale is not None for module in standard)) == said.standardized
    recipe = load_recipe(name, {"data_dir": "somewhere"})
    optimizer = build_optimizer(model, recipe)
    assert {group.get("eps") for group in optimizer.param_groups} == {said.eps}
    assert not any(group.get("nesterov") for group in optimizer.param_groups) or name == "imagenet-bnn-resnet50"
    decay = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    kept = getattr(model, "no_weight_decay", set)()
    for parameter_name, parameter in model.named_parameters():
        weight = parameter.ndim > 1 and not any(parameter_name.endswith(one) for one in kept)
        expected = said.decay == "all" or weight or ".proxy_" in f".{parameter_name}"
        assert (decay[id(parameter)] > 0) == (expected and recipe.weight_decay > 0), parameter_name


def test_every_recipe_is_valid_and_says_what_it_follows_and_was_run_on() -> None:
    assert set(SAID) == set(recipe_summaries())
    assert all(recipe_summaries().values())
    for name in SAID:
        assert load_recipe(name, {"data_dir": "somewhere"}).epochs > 0
        assert "# Run on: " in recipe_text(name), name
        assert "ollow" in recipe_text(name) or "table" in recipe_text(name), name
