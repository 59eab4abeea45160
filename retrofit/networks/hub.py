"""A network for the Hugging Face hub: the folder that goes there, with its model card."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import ModelCardData
from jinja2 import Environment, PackageLoader
from timm.models._hub import save_config_for_hf
from torch import nn

from retrofit.errors import RetrofitError
from retrofit.networks import artifact
from retrofit.networks.artifact import CONFIG, LIBRARY, WEIGHTS
from retrofit.networks.manifest import read_manifest
from retrofit.record import ModelSource, unwrapped
from retrofit.utils.text import printable

CARD = "README.md"


def save_for_hub(
    model: nn.Module,
    folder: str | Path,
    *,
    license: str | None = None,
    details: Mapping[str, str] | None = None,
    force: bool = False,
    **options: Any,
) -> Path:
    """Write a model's folder for the Hugging Face hub: the artifact, timm's config.json and a model
    card.

    `retrofit.load` opens the folder. timm can open it too if the network is an unconverted timm
    network. It refuses any other by its architecture name, because it would build the source
    without what the conversion added.

    Args:
        model: The network, converted or not.
        folder: The folder to write; created if it does not exist.
        license: The license for the card, as the hub spells it ("apache-2.0").
        details: More lines for the card, as {heading: text}: data, recipe, accuracy.
        force: Whether to replace the files of an existing folder.
        **options: Arguments of `retrofit.save`.

    Returns:
        The folder.

    Raises:
        RetrofitError: As for `retrofit.save`, or if the files already exist; nothing is written in
            that case.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise RetrofitError(f"{folder} is a file; name a folder")
    existing = [name for name in (WEIGHTS, CONFIG, CARD) if (folder / name).exists()]
    if existing and not force:
        raise RetrofitError(
            f"{folder} holds {', '.join(existing)} already; choose another folder or pass "
            "`force=True`"
        )
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary)
        artifact.save(model, staged / WEIGHTS, **options)
        manifest = read_manifest(staged / WEIGHTS)
        _write_config(model, manifest, staged / CONFIG)
        (staged / CARD).write_text(_model_card(manifest, license, details or {}), "utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CARD, CONFIG, WEIGHTS):
            shutil.move(staged / name, folder / name)
    return folder


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Add model",
    **options: Any,
) -> str:
    """Upload a network to the Hugging Face hub, in the form that `save_for_hub` writes.

    Args:
        model: The network, converted or not.
        repo_id: The repository, "owner/name"; created if it does not exist.
        private: Whether a newly created repository is private.
        token: Access token for the hub; None for the logged-in user's.
        revision: Branch to push to; None for the main branch.
        create_pr: Whether to open a pull request.
        commit_message: Commit message.
        **options: Arguments of `save_for_hub`.

    Returns:
        The URL of the commit.

    Raises:
        RetrofitError: As for `retrofit.save`; nothing is uploaded in that case.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_for_hub(model, temporary, **options)
        api = huggingface_hub.HfApi(token=token, library_name=LIBRARY)
        commit = api.upload_folder(
            repo_id=api.create_repo(repo_id, private=private, exist_ok=True).repo_id,
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
        )
    return str(commit.commit_url)


def _write_config(model: nn.Module, manifest: Mapping[str, Any], path: Path) -> None:
    """Write what timm and transformers read, as timm does."""
    source = ModelSource.from_dict(manifest["model"])
    to = manifest["conversion"]["to"]
    ours = {"library_name": LIBRARY, "pretrained_cfg": manifest["preprocess"]}
    if source.library == "timm" and not to:
        save_config_for_hf(unwrapped(model), str(path), ours, source.kwargs)
        return
    # timm reads a name up to its first dot.
    network = f"{to} of {source}" if to else f"network {source}"
    config: dict[str, Any] = {"architecture": f"{network}: open it with retrofit.load", **ours}
    if manifest["labels"] is not None:
        config["label_names"] = manifest["labels"]
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _model_card(
    manifest: Mapping[str, Any], license: str | None, details: Mapping[str, str]
) -> str:
    """Return the card of an artifact, from what `read_manifest` returns."""
    target = manifest["conversion"]["to"]
    builder = manifest["model"]["library"]
    tags = filter(None, [LIBRARY, target, builder])
    environment = Environment(
        loader=PackageLoader("retrofit", "networks"),
        # The newline behind `%}` is dropped: a line that ends in a tag needs an empty one after it.
        trim_blocks=True,
        finalize=lambda value: printable(value, 500),
    )
    card = environment.get_template("model_card.md").render(
        manifest=manifest, details=details, license=license
    )
    head = ModelCardData(license=license, library_name=LIBRARY, tags=list(tags)).to_yaml()
    return f"---\n{head}\n---\n\n{card}\n"
