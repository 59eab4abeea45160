r"""The guide on differential privacy as written, with several seeds, epsilons and other networks.

    python benchmarks/hospital.py
    python benchmarks/hospital.py --table

The page's first Python block is run as it stands but for some values: the epsilon, the seed, the
learning rate, what the fixer puts in BatchNorm's place or what is trained. The memory is that of
one step of resnet18, by what is trained and how many samples' gradients lie in memory at a time.
Each finished run is a line of hospital.jsonl; started again, the script goes on with what is
missing. `--table` writes hospital.md from the lines.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

from harness import (
    Line,
    Recorded,
    command_line,
    grouped,
    machine,
    machines,
    markdown,
    publish,
    with_error,
)

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "privacy.md"
FIX = 'model = ModuleValidator.fix(public, to="frozen").train()'
TRAINED = "trained = [*norms, model.fc]"
ARMS = {
    "norms and last layer, `frozen`": {},
    "the last layer alone": {TRAINED: "trained = [model.fc]"},
    # Opacus's fixer, without retrofit's; `norms` are the GroupNorms that it makes.
    "norms and last layer, Opacus's own GroupNorm": {
        # A ResNet adds in place, which Opacus's hooks refuse behind its GroupNorms.
        FIX: "model = torch.fx.symbolic_trace(public).train()\n"
        "for node in model.graph.nodes:\n"
        "    if node.target is operator.iadd:\n"
        "        node.target = operator.add\n"
        "model.recompile()\n"
        "for name, layer in list(model.named_modules()):\n"
        "    if isinstance(layer, torch.nn.BatchNorm2d):\n"
        "        model.set_submodule(name, opacus_fix(layer))",
        "import timm\n": "import operator\nimport timm\nfrom opacus.validators.batch_norm import fix as opacus_fix\n",
    },
}
STEP = """
import sys, timm, torch, retrofit.opacus, resource, time
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
source = timm.create_model("resnet18", num_classes=10)
names = [name for name, layer in source.named_modules() if isinstance(layer, torch.nn.BatchNorm2d)]
model = ModuleValidator.fix(source, to="frozen").train()
if sys.argv[2] == "norms":
    model.requires_grad_(False)
    for name in [*names, "fc"]:
        model.get_submodule(name).requires_grad_(True)
data = TensorDataset(torch.randn(64, 3, 32, 32), torch.arange(64) % 10)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=DataLoader(data, 64), noise_multiplier=1.0,
    max_grad_norm=1.0, poisson_sampling=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
with BatchMemoryManager(data_loader=loader, max_physical_batch_size=int(sys.argv[1]),
                        optimizer=optimizer) as batches:
    for images, labels in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.process_time() - start)
"""


def code(key: Line) -> str:
    """Return the page's first block with the values of a run.

    Raises:
        ValueError: The page does not hold a line that a run replaces.
    """
    block = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    changes = {
        "manual_seed(0)": f"manual_seed({key['seed']})",
        "target_epsilon=8": f"target_epsilon={key['eps']}",
        "lr=0.3)": f"lr={key['lr']})",
        **ARMS[key["arm"]],
    }
    for old, new in changes.items():
        if old not in block:
            raise ValueError(f"the page does not hold {old!r}")
        block = block.replace(old, new)
    return block[: block.index("# Hand it over")]


def run(key: Line) -> Line:
    """Run the page's code once in a process of its own, and return the line of the run."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", json.dumps(key)]
    output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    return {**key, **json.loads(output.splitlines()[-1]), "machine": machine()}


def one(key: Line) -> None:
    """Run the page's code in this process, and print what it measured."""
    names: dict[str, object] = {"__name__": "page"}
    warnings.simplefilter("ignore")
    exec(compile(code(key), PAGE.name, "exec"), names)
    result = {
        "before": round(100 * names["before"], 2),  # type: ignore[operator]
        "test": round(100 * names["after"], 2),  # type: ignore[operator]
    }
    print(json.dumps(result))


def step(at_once: int, trained: str) -> Line:
    """Measure the memory and the time of one step."""
    command = [sys.executable, "-W", "ignore", "-c", STEP, str(at_once), trained]
    output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    kibibytes, seconds = output.split()[-2:]
    memory = round(int(kibibytes) / 1024)
    return {"mebibytes": memory, "cpu_seconds": round(float(seconds), 1), "machine": machine()}


def tables(lines: list[Line]) -> list[str]:
    """Return the table of accuracies and that of memory."""
    runs = [line for line in lines if "eps" in line]
    rows = []
    setups = ["arm", "eps", "lr"]
    for (arm, eps, rate), same in sorted(grouped(runs, setups).items(), key=lambda item: item[0]):
        test = with_error([line["test"] for line in same])
        before = with_error([line["before"] for line in same])
        rows.append((arm, eps, rate, len(same), before, test))
    steps = [
        (line["trained"], line["at_once"], line["mebibytes"], line["cpu_seconds"])
        for line in lines
        if "at_once" in line
    ]
    head = ["trained privately", "epsilon", "learning rate", "seeds", "top-1 before", "top-1"]
    return [
        *markdown(head, rows),
        "",
        *markdown(["trained", "samples at a time", "MiB above the start", "CPU s"], steps),
    ]


def main() -> None:
    parser = command_line(__doc__, "--table", "--seeds", "--until", out="hospital.jsonl")
    parser.add_argument("--one", type=json.loads, help="one run, in this process")
    parser.add_argument("--eps", nargs="+", type=int, default=[8, 3, 1])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.3, 1.0])
    args = parser.parse_args()
    if args.one:
        one(args.one)
        return
    recorded = Recorded(args.out)
    if not args.table:
        for trained, at_once in itertools.product(("all", "norms"), (8, 64)):
            key = {"trained": trained, "at_once": at_once}
            recorded.done(key, lambda key=key: [{**key, **step(**key)}], args.until)
        for seed, eps, rate, arm in itertools.product(args.seeds, args.eps, args.rates, ARMS):
            key = {"arm": arm, "eps": eps, "lr": rate, "seed": seed}
            recorded.done(key, lambda key=key: [run(key)], args.until)
    note = (
        "The guide's code on one core: top-1 in percent of 297 digits as the hospital's device shows them, mean ± "
        "standard error over seeds, before and after private training. Below, one step of 64 images of 32 px of "
        "resnet18: all parameters trained, or the norms and the last layer."
    )
    publish(args.out, [note, "", *machines(recorded.lines()), "", *tables(recorded.lines())])


if __name__ == "__main__":
    main()
