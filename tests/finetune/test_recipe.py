"""Recipes: what is shipped is valid, what is wrong is said all at once, what was run can be run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.recipe import Recipe, load_recipe
from retrofit.finetune.shipped import read_shipped, shipped

NAMES = [
    "cifar10",
    "digits",
    "imagenet-bnn-resnet50",
    "imagenet-gn-pn-efficientnet",
    "imagenet-gn-pn-resnet50",
    "imagenet-gn-ws-pn-resnet50",
    "imagenet-lnn-vit",
    "imagenet-rivals-efficientnet",
    "quick-recover",
]


def test_what_is_shipped() -> None:
    assert list(shipped()) == NAMES
    assert all(summary for summary in shipped().values())


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_is_valid_and_says_what_it_follows(name: str) -> None:
    recipe = load_recipe(name, {"data_dir": "somewhere"})
    assert recipe.epochs > 0
    assert "ollow" in read_shipped(name) or "table" in read_shipped(name)


def test_flags_win_and_come_as_text() -> None:
    recipe = load_recipe("digits", {"lr": "1e-3", "epochs": "3", "scale": "0.5 1", "decay_milestones": "2,4"})
    assert (recipe.lr, recipe.epochs, recipe.scale, recipe.decay_milestones) == (1e-3, 3, (0.5, 1.0), [2, 4])
    assert recipe.dataset == "digits"


def test_a_saved_recipe_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("quick-recover", {"data_dir": "x", "model": "m.safetensors", "val_split": "0.2"})
    recipe.save(tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml", {}) == recipe
    named = load_recipe(None, {"data_dir": "x", "val_split": "test"})
    named.save(tmp_path / "recipe.yaml")
    assert load_recipe(str(tmp_path / "recipe.yaml"), {}).val_split == "test"


def test_a_dataset_s_name_may_stand_in_the_place_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = load_recipe(None, {"data_dir": "hfds/cifar10"})
    assert (named.dataset, named.data_dir) == ("hfds/cifar10", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch" / "cifar10").mkdir(parents=True)
    assert (
        load_recipe(None, {"data_dir": "torch/cifar10"}).data_dir == "torch/cifar10"
    )  # a folder of that name is meant


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("lrr: 1\nepochs: 0\nopt: adamx\nstrength_sched: quadratic\nval_split: 3\ntask_loss_weight: 0\n")
    with pytest.raises(UsageError) as caught:
        load_recipe(path, {"batch_size": "five"})
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"7 mistakes in recipe {path}: ")
    for part in (
        "unknown setting 'lrr' (did you mean lr?)",
        "epochs should be greater than or equal to 1, not 0",
        "batch_size should be",
        "strength_sched should be 'linear', 'cosine' or 'off', not 'quadratic'",
        "val_split should be less than or equal to 1, not 3",
        "opt 'adamx' is unknown to timm (did you mean adamax",
        "task_loss_weight 0 needs teacher: source",
    ):
        assert part in said, said


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"mixup": 0.2, "batch_size": 5}, "even batch_size"),
        ({"amp_dtype": "bfloat16"}, "set amp: true too"),
        ({"dataset": "torch/cifar10"}, "needs data_dir too"),
        ({"data_dir": "torch/cifar10"}, "dataset torch/cifar10 needs data_dir too"),
        ({"teacher": "source", "task_loss_weight": 0, "distill_loss_weight": 0}, "must be above 0"),
        ({"teacher": "source", "task_loss_weight": 0, "cutmix": 1.0}, "act on labels"),
        ({"lr": float("inf")}, "lr should be"),
        ({"sched": "plateau"}, "sched 'plateau' is unknown"),
    ],
)
def test_contradictions(settings: dict[str, object], pattern: str) -> None:
    with pytest.raises(UsageError, match=pattern):
        load_recipe(None, settings)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("lr: [1", "is not YAML"), ("- lr\n- epochs\n", "holds no settings"), ("\x00", "is not YAML")],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, pattern: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=pattern):
        load_recipe(path, {})


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no recipe 'digit'; did you mean digits"):
        load_recipe("digit", {})
    with pytest.raises(RetrofitError, match="cannot read the recipe"):
        load_recipe(tmp_path / "absent.yaml", {})


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Recipe.model_fields.values())
