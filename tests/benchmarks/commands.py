"""Counts the launches, waits, copies and bytes of complete commands on a simulated device.

python tests/benchmarks/commands.py [NAME …]    # of a tiny Llama with 4 layers

`PYTHONPATH=FOLDER` counts the commands of another commit. *MB moved* adds what every kernel reads and writes, as if
nothing stayed in a cache.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

sys.path.append(str(Path(__file__).parents[1]))
from support.counted_commands import COUNTED_COMMANDS
from support.simulated import Device, counting, is_launch, moved, simulated
from tiny import tiny_model


def main(names: list[str]) -> None:
    def see(func: Any, arguments: tuple, named: dict[str, Any], output: Any) -> None:
        nonlocal bytes_moved
        if is_launch(func):
            tensors = pytree.tree_leaves((arguments, named, output))
            bytes_moved += sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))

    print("| | launches | waits | copies | MB moved |\n| --- | ---: | ---: | ---: | ---: |")
    for name in names or COUNTED_COMMANDS:
        bytes_moved = 0
        with simulated():
            model = moved(tiny_model("llama", num_hidden_layers=4))
            Device.watch = see
            with counting() as counts:
                COUNTED_COMMANDS[name](model)
            Device.watch = None
        numbers = counts["launches"], counts["synchronizations"], counts["copies"], bytes_moved / 1e6
        print(f"| `{name}` | {' | '.join(f'{number:,.0f}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
