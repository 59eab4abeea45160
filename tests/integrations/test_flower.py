"""The page's Flower project: real apps and a real FedAvg, in one process."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import retrofit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

IDS = [7_301, 44, 912]
PAGE = Path(__file__).parents[2] / "docs" / "appendix" / "flower.md"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules `task` and `apps` of the page, in a folder that `flwr run` accepts."""
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    from flwr.cli.config_utils import load_and_validate
    from flwr.supercore.task_identity import TaskIdentity

    files = ("pyproject.toml", "task.py", "apps.py", "loop.py")
    blocks = re.findall(r"^```(?:toml|python)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.M)
    for file, block in zip(files, blocks, strict=True):
        Path(file).write_text(block)
    load_and_validate(tmp_path / "pyproject.toml")
    # flwr's runtime sets these in each process that it starts.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    import apps  # type: ignore[import-not-found]

    yield apps
    for name in ("apps", "task"):
        del sys.modules[name]


def context(node: int, norm: str) -> Any:
    from flwr.app import Context, RecordDict

    # Flower draws the ids of nodes, and counts their parts of the data from 0.
    part = {"partition-id": IDS.index(node)} if node in IDS else {}
    config = {"norm": norm, "lr": 0.03, "num-rounds": 2}
    return Context(run_id=1, node_id=node, node_config=part, state=RecordDict(), run_config=config)


def in_process(project: Any, norm: str) -> Any:
    """Return a grid that answers each message with the client app, as three nodes would."""
    from flwr.app import Message
    from flwr.serverapp import Grid

    class InProcess(Grid):
        def set_run(self, run: Any) -> None: ...

        @property
        def run(self) -> Any: ...

        def create_message(self, *args: Any, **options: Any) -> Message:
            return Message(*args, **options)

        def get_node_ids(self) -> Iterable[int]:
            return IDS

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            raise NotImplementedError

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            raise NotImplementedError

        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            return [
                project.client_app(message, context(message.metadata.dst_node_id, norm))
                for message in messages
            ]

    return InProcess()


@pytest.mark.parametrize("norm", ["eval", "batch", "frozen", "ln"])
def test_the_project_trains_a_server(
    norm: str, project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    server = project.network(norm)
    if norm == "ln":
        retrofit.set_strength(server, 0.5)
    before = {name: value.clone() for name, value in server.state_dict().items()}
    networks = iter([server])
    build = project.network
    monkeypatch.setattr(project, "network", lambda norm: next(networks, None) or build(norm))
    project.server_app(in_process(project, norm), context(0, norm))
    after = torch.load("server.pth")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.allclose(after[name], before[name])}
    assert "fc.weight" in changed
    assert "conv1.0.weight" not in changed  # only the norms and the last layer are trained
    assert any("bn" in name and name.endswith("bias") for name in changed)
    constants = [name for name in before if "running_" in name or name.endswith("strength")]
    assert constants
    kept = [torch.allclose(after[name].double(), before[name].double()) for name in constants]
    assert all(kept) is (norm != "batch")


def test_a_supernode_without_images_is_told_how_many_to_start(project: Any) -> None:
    del project.clients[-1]
    content = project.RecordDict({})
    message = project.Message(content, dst_node_id=IDS[-1], message_type="train")
    with pytest.raises(ValueError, match="SuperNode 2 has no images; start 2 SuperNodes"):
        project.client_app(message, context(IDS[-1], "eval"))


def test_the_loop_without_flower_trains_and_exports(project: Any) -> None:
    import loop  # type: ignore[import-not-found]

    del sys.modules["loop"]
    loaded = retrofit.load("server.safetensors").eval()
    torch.testing.assert_close(loaded(loop.test_images), loop.server.eval()(loop.test_images))
    assert Path("server.onnx").is_file()
