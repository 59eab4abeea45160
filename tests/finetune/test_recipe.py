"""Recipes: what is wrong is said all at once, and each that is shipped trains what the paper
says.
"""

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from retrofit.cli import main
from retrofit.cli.convert import command
from retrofit.conversion_options import OPTIONS
from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.optimization import build_optimizer
from retrofit.finetune.recipe_files import load_recipe, recipe_summaries, recipe_text
from retrofit.layers import ProxyNorm
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.networks.cifar import resnet18
from retrofit.surgery import apply, plan
from tests.finetune.test_optimization import by_parameter


def test_flags_win_and_come_as_text() -> None:
    recipe = load_recipe(
        "digits", {"lr": "1e-3", "epochs": "3", "scale": "0.5 1", "decay_milestones": "2,4"}
    )
    assert (recipe.lr, recipe.epochs, recipe.scale, recipe.decay_milestones) == (
        1e-3,
        3,
        (0.5, 1.0),
        [2, 4],
    )
    assert recipe.dataset == "digits"


def test_a_saved_recipe_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(
        "quick-recover", {"data_dir": "x", "model": "m.safetensors", "val_split": "0.2"}
    )
    recipe.save(tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml", {}) == recipe
    named = load_recipe(None, {"data_dir": "x", "val_split": "test"})
    named.save(tmp_path / "recipe.yaml")
    assert load_recipe(str(tmp_path / "recipe.yaml"), {}).val_split == "test"


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [
        ({"dataset": "digits"}, {"data_dir": "photos.tar"}, ("photos.tar", "")),
        ({"data_dir": "photos"}, {"dataset": "digits"}, (None, "digits")),
        ({"data_dir": "d", "dataset": "torch/cifar10"}, {"data_dir": "photos"}, ("photos", "")),
        ({"data_dir": "d", "dataset": "torch/cifar10"}, {"epochs": 1}, ("d", "torch/cifar10")),
        (
            {"dataset": "digits"},
            {"data_dir": "d", "dataset": "torch/cifar10"},
            ("d", "torch/cifar10"),
        ),
        ({"data_dir": "photos"}, {"data_dir": "hfds/cifar10"}, (None, "hfds/cifar10")),
        ({}, {"data_dir": "torch/cifar10"}, ("torch/cifar10", "")),  # the folder of that name
    ],
)
def test_images_come_from_one_place(
    tmp_path: Path,
    own: Any,
    given: Any,
    expected: tuple[str | None, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torch/cifar10").mkdir(parents=True)
    Path("own.yaml").write_text("".join(f"{name}: {value}\n" for name, value in own.items()))
    recipe = load_recipe("own.yaml", given)
    assert (recipe.data_dir, recipe.dataset) == expected


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(
        "lrr: 1\nepochs: 0\nopt: adamx\nstrength_sched: quadratic\nval_split: 3\ntask_loss_weight: 0\n"
    )
    with pytest.raises(UsageError) as caught:
        load_recipe(path, {"batch_size": "five"})
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"6 mistakes in recipe {path}: ")
    for part in (
        "unknown setting 'lrr' (did you mean lr?)",
        "epochs should be greater than or equal to 1, not 0",
        "batch_size should be",
        "strength_sched should be 'linear', 'cosine', 'there-and-back' or 'off', not 'quadratic'",
        "val_split should be a split's name, or from 0 to below 1, not 3",
        "opt 'adamx' is unknown to timm (did you mean ada",
        "task_loss_weight 0 needs teacher: source",
    ):
        assert part in said, said


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        *(
            ({"mixup": 0.2, "batch_size": 5}, "even batch_size"),
            ({"amp_dtype": "bfloat16"}, "set amp: true too"),
            ({"no_aug": True, "aa": "rand-m9", "reprob": 0.2}, "not apply aa and reprob; set no_"),
            ({"crop_pct": 1e9}, "crop_pct should be less than or equal to 1"),
            ({"val_split": [1]}, "1 mistake .* val_split should be a split's name, or from 0"),
            ({"lr": True, "epochs": True}, "2 mistakes .*lr should be a value, not True"),
            ({"val_split": False, "opt": False}, "2 mistakes .*val_split should be a value"),
            ({"val_split": "nan"}, "1 mistake .* val_split should be a split's name, or from 0"),
        ),
        ({"data_dir": "torch/cifar10"}, "dataset torch/cifar10 needs data_dir too"),
        ({"teacher": "source", "task_loss_weight": 0, "distill_loss_weight": 0}, "must be above 0"),
        ({"teacher": "source", "task_loss_weight": 0, "cutmix": 1.0}, "act on labels"),
        *(
            ({"lr": float("inf")}, "lr should be"),
            ({"scale": "0.5"}, "scale should be two numbers, not ..0.5"),
            ({"scale": "1,0.1"}, "scale should be two numbers, the smaller first, not .1"),
        ),
        ({"sched": "plateau"}, "sched should be 'cosine', 'tanh', .*, not 'plateau'"),
        (
            {"sched": "none", "warmup_epochs": 2, "layer_decay": 0.5},
            "not apply warmup_epochs and layer_decay",
        ),
        *(
            ({"warmup_epochs": 5, "epochs": 3}, "warm-up takes 5 epochs and the run 3, .*lower"),
            ({"min_lr": 1e-3}, "min_lr 0.001 is above lr 0.0003"),
            ({"sched": "step"}, "sched step would first lower lr after 90 .* has 10; set decay_ep"),
            ({"sched": "step", "decay_epochs": 10}, "after 10 epochs"),
            ({"sched": "multistep"}, "after 30 epochs, .* has 10; set decay_milestones"),
            ({"sched": "multistep", "decay_milestones": []}, "after inf epochs"),
        ),
    ],
)
def test_contradictions(settings: dict[str, object], pattern: str) -> None:
    with pytest.raises(UsageError, match=pattern):
        load_recipe(None, settings)


def test_no_schedule_has_no_warm_up_and_a_constant_one_has() -> None:
    none, constant = (
        load_recipe(None, {"sched": sched, "epochs": 20}) for sched in ("none", "constant")
    )
    assert (none.warmup, constant.warmup) == (0, 2)
    assert load_recipe(None, {"sched": "none", "warmup_epochs": 0}).warmup == 0


def references(first: str, more: str) -> str:
    """Thirty lines that each refer to the one before, twice: written out they would be
    gigabytes.
    """
    return f"a0: &a0 {first}\n" + "".join(
        f"a{i}: &a{i} {more.format(f'a{i - 1}')}\n" for i in range(1, 31)
    )


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        *(
            ("lr: [1", "is not YAML"),
            ("- lr\n- epochs\n", "holds no settings"),
            ("lr: 1\nlr: 2", "sets lr twice"),
        ),
        (
            references("[lol, lol]", "[*{0}, *{0}]") + "lr: *a30",
            "32 mistakes in .* unknown setting 'a0'",
        ),
        (references("{b: 1}", "{{<<: [*{0}, *{0}]}}"), "tag:yaml.org,2002:merge"),
        *(
            ("lr: &a [*a]", "lr should be a valid number"),
            ("lr: " + "[" * 3000 + "]" * 3000, "recursion"),
        ),
        ("\n".join(f"k{i}: 1" for i in range(1800)), "1,800 mistakes"),
        ("\n".join(f"k{i}: 1" for i in range(100_000)), "more than 16,384"),
        *(
            ("lr: " + "9" * 5000, "Exceeds the limit"),
            ("val_split: 0x" + "f" * 5000, "val_split should be"),
        ),
        ("epochs: 99999999999999999999", "epochs should be less than"),
        ("opt: " + "x" * 16_000, r"opt 'xxxx.*\.\.\.x+' is unknown"),
        ('"a\\nb\\e[2J": 1', r"unknown setting 'a\\nb\\x1b\[2J'"),
        ("data_dir: torch/" + "x" * 16_000, "dataset torch/xxx"),
        ("0x" + "f" * 900 + ": 1", "unknown setting '<int>'"),
        ("on: 1\nlrr: 2", "2 mistakes in .* unknown setting '<bool>', unknown setting 'lrr'"),
        ("opt: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ('opt: "\\ud800"', r"opt should be .*\\ud800"),
    ],
)
def test_a_hostile_recipe_is_one_short_line(tmp_path: Path, text: str, pattern: str) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(RetrofitError, match=pattern) as caught:
        load_recipe(path, {})
    message = str(caught.value)
    assert message.isprintable()
    # The folder of a test's files may have a long name.
    assert len(message.replace(str(tmp_path), "")) <= 600


def test_what_is_not_there_or_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"opt: \xff")
    for path, error, words in (
        (
            "digit",
            UsageError,
            r"no recipe 'digit' \(did you mean digits\?\); `retrofit recipes` lists",
        ),
        ("n" * 5000, UsageError, "no recipe 'nnn"),
        (
            tmp_path / "absent.yaml",
            RetrofitError,
            r"there is no recipe at .*absent.yaml; check the path",
        ),
        (tmp_path / "pipe.yaml", RetrofitError, "pipe.yaml is a pipe or a device; check the path"),
        (tmp_path / "latin.yaml", RetrofitError, "codec can't decode"),
        (tmp_path, RetrofitError, "is a folder; check the path"),
    ):
        with pytest.raises(error, match=words):
            load_recipe(path, {})


@dataclass(frozen=True)
class Said:  # what holds of a recipe's network and optimizer
    converted: tuple[int, int]  # norms, and how many there are
    last_map: tuple[
        int, int
    ]  # sides of what the classifier pools; or, of a ViT, its tokens and features
    decay: str  # of "all" parameters; of "weights" of convolutions, linear layers and ProxyNorm
    eps: float | None  # the optimizer's, None where it has none
    proxied: tuple[int, int] = (0, 0)  # activations, and how many there are
    standardized: tuple[int, int] = (0, 0)  # convolutions, and how many of them have a scale


SAID = {
    "cifar10": [Said((20, 20), (4, 4), "all", None)],
    "cifar10-vit": [Said((17, 17), (65, 768), "all", 1e-8)],
    "digits": [],
    "imagenet-bnn-resnet50": [Said((53, 53), (7, 7), "weights", None)],
    "imagenet-gn-pn-efficientnet": [
        Said((49, 49), (7, 7), "weights", 1e-3, proxied=(33, 65))
    ],  # 32 in SE
    "imagenet-gn-pn-resnet50": [Said((49, 49), (7, 7), "all", None, proxied=(49, 49))],
    "imagenet-gn-ws-pn-resnet50": [
        Said((49, 49), (7, 7), "all", None, proxied=(49, 49), standardized=(53, 16)),
        Said((49, 49), (7, 7), "all", None, standardized=(53, 16)),
        Said((49, 49), (7, 7), "all", None, proxied=(49, 49)),
    ],
    "imagenet-lnn-vit": [Said((25, 25), (197, 384), "weights", 1e-8)],
    "imagenet-rivals-efficientnet": [Said((49, 49), (7, 7), "weights", 1e-3)] * 2,
    "quick-recover": [Said((53, 53), (7, 7), "weights", 1e-8, proxied=(33, 49))],
}


def commands(
    name: str,
) -> list[list[str]]:  # the arguments of `retrofit convert` in a recipe's header
    text = re.sub(r"^#", "", recipe_text(name).replace("\\\n#", ""), flags=re.MULTILINE)
    text = re.sub(r"  +(GN\S*|Evo\S*)$", "", text, flags=re.MULTILINE)
    return [
        shlex.split(line)[2:]
        for line in text.splitlines()
        if line.strip().startswith("retrofit convert ")
    ]


def network(given: dict[str, Any], side: int) -> nn.Module:
    """What `retrofit convert` would start from, on the meta device."""
    if str(given["model"]).startswith("py:retrofit.networks.cifar:resnet18"):
        return resnet18()
    kwargs = {**dict(given["model_kwargs"] or ()), "num_classes": given["num_classes"]}
    kwargs |= {"img_size": side} if "vit" in given["model"] else {}
    return timm.create_model(
        given["model"], **{name: value for name, value in kwargs.items() if value}
    )


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, said in SAID.items() for i in range(len(said))]
)
def test_the_network_and_its_optimizer_are_what_the_paper_says(name: str, number: int) -> None:
    said, found = SAID[name][number], commands(name)
    assert len(found) == len(SAID[name])
    # The group's settings hold for its commands, which remember them.
    group = main.make_context("retrofit", [], resilient_parsing=True)
    given = command.make_context("convert", found[number], group).params
    side = given["img_size"] or 224
    with torch.device("meta"), torch.no_grad():
        model = network(given, side).eval()
        features = model.forward_features(torch.empty(1, 3, side, side))
    assert features.shape[-2:] == said.last_map
    options = {key: given[key] for key in OPTIONS if given.get(key) is not None}
    made = plan(model, str(given["to"]), **options)
    assert (made.counts["converted"], sum(made.counts.values())) == said.converted
    model, _ = apply(made, model)
    activations = [row for row in made.edits if row.kind == "activation"]
    proxied = sum(isinstance(module, ProxyNorm) for module in model.modules())
    if said.proxied[1]:
        assert (proxied, len(activations)) == said.proxied
    standard = [module for module in model.modules() if isinstance(module, WeightStandardization)]
    assert (
        len(standard),
        sum(module.scale is not None for module in standard),
    ) == said.standardized
    recipe = load_recipe(name, {"data_dir": "somewhere"})
    optimizer = build_optimizer(model, recipe)
    assert {group.get("eps") for group in optimizer.param_groups} == {said.eps}
    assert (
        not any(group.get("nesterov") for group in optimizer.param_groups)
        or name == "imagenet-bnn-resnet50"
    )
    decay = by_parameter(optimizer.param_groups, "weight_decay")
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
        assert re.search(r"ollow|table", recipe_text(name)), name
        assert "# Run on: " in recipe_text(name), name
