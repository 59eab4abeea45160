"""Where an artifact lies: a file, a folder of the hub's form, or the hub."""

from __future__ import annotations

import json
from pathlib import Path

from retrofit.errors import RetrofitError
from retrofit.networks.library import no_waiting_for_the_hub
from retrofit.networks.manifest import is_artifact
from retrofit.utils.text import one_line

WEIGHTS, CONFIG = "model.safetensors", "config.json"
LIBRARY = "retrofit"


def artifact_behind(text: str) -> Path | None:
    """Return the artifact that `hf-hub:OWNER/NAME[@REVISION]` or `local-dir:FOLDER` holds, fetched if need be.

    Returns:
        None if the text is of another form, the hub gives no answer, or what lies there is not ours.

    Raises:
        RetrofitError: If the artifact is there and cannot be fetched.
    """
    prefix, colon, rest = text.partition(":")
    prefix = prefix.replace("_", "-").lower()
    if prefix == "local-dir" and colon:
        file = Path(rest) / WEIGHTS
        return file if is_artifact(file) else None
    if prefix != "hf-hub" or not rest:
        return None
    from huggingface_hub import hf_hub_download

    repo_id, _, revision = rest.partition("@")
    try:
        with no_waiting_for_the_hub():
            config = json.loads(Path(hf_hub_download(repo_id, CONFIG, revision=revision or None)).read_text("utf-8"))
    except (OSError, ValueError):  # what opens a network of timm's there says why it cannot
        return None
    if not isinstance(config, dict) or config.get("library_name") != LIBRARY:
        return None
    try:
        with no_waiting_for_the_hub():
            return Path(hf_hub_download(repo_id, WEIGHTS, revision=revision or None))
    except (OSError, ValueError) as error:
        raise RetrofitError(f"{text} cannot be fetched: {one_line(error)}; check the connection") from error
