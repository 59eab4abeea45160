"""The guide's Flower apps: a real ClientApp, ServerApp and FedAvg, in one process."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import retrofit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

IDS = [7_301, 44, 912]
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "federated.md"


@pytest.mark.parametrize("target", ["frozen", "ln"])
def test_the_apps_of_the_guide_train_a_server(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.chdir(tmp_path)
    from flwr.app import Context, Message, RecordDict
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    # flwr's runtime sets these in each process that it starts.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    torch.manual_seed(0)
    example, apps = re.findall(
        r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE
    )
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(example.replace('"frozen"', f'"{target}"'), GUIDE.name, "exec"), names)
    exec(compile(apps, GUIDE.name, "exec"), names)

    def context(node: int) -> Context:
        # Flower draws the ids of nodes, and counts their parts of the data from 0.
        config = {"partition-id": IDS.index(node)} if node in IDS else {}
        return Context(
            run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={}
        )

    class InProcess(Grid):
        """Answers each message with the client app, as three nodes would."""

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
                names["client_app"](message, context(message.metadata.dst_node_id))
                for message in messages
            ]

    server = names["server"]
    retrofit.set_strength(server, 0.5) if target == "ln" else None
    before = {name: value.clone() for name, value in server.state_dict().items()}
    names["server_app"](InProcess(), context(0))
    after = server.state_dict()
    assert after.keys() == before.keys()
    first = next(name for name in before if name.endswith("weight"))
    assert not torch.equal(after[first], before[first])
    statistics = [name for name in before if "running_" in name or name.endswith("strength")]
    assert statistics
    for name in statistics:  # constants of the network, which averaging keeps
        torch.testing.assert_close(after[name], before[name])
    loaded = retrofit.load("flower.safetensors").eval()
    images = names["test_images"]
    torch.testing.assert_close(loaded(images), server.eval()(images))
