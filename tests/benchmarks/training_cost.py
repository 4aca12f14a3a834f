"""Compares the predicted time of a training step with the measured one on this CPU, for models of three widths.

    python tests/benchmarks/training_cost.py

Peak (of matrix products of the models' width) and bandwidth (of a copy) are measured first; the utilization is then 1.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from sinkscope.commands.train.architectures import architecture, fresh_model
from sinkscope.commands.train.blocks import Blocks
from sinkscope.commands.train.cost import Cost, Device
from sinkscope.commands.train.options import TrainOptions
from sinkscope.commands.train.trainer import train_model
from sinkscope.options.option import checked

CONFIGS = ("tiny-llama", "llama-60m:num_hidden_layers=4,vocab_size=8192", "llama-0.1b:num_hidden_layers=6")
STEPS, ROUNDS = 6, 3


def seconds_of(work: object, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def this_device(width: int, rows: int) -> Device:
    x, weight, large = torch.randn(rows, width), torch.randn(width, 2 * width), torch.randn(1 << 25)
    peak = 2 * x.numel() * 2 * width / seconds_of(lambda: x @ weight)
    copy = large.clone()  # its pages are there, so that no time of the system is in it
    bandwidth = 2 * 4 * large.numel() / seconds_of(lambda: copy.copy_(large))
    return Device(peak, peak, bandwidth)


def step_seconds(config: str, options: TrainOptions) -> float:
    """Time of a step: the difference of trainings of STEPS + 1 and 1 steps, without start and end."""
    times = []
    for steps in (1, STEPS + 1):
        model = fresh_model(architecture(config), 0)
        ids = np.random.default_rng(0).integers(3, 4000, (64, options.block_length))
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            train_model(model, Blocks(ids, ids[:2], "random"), options.model_copy(update={"steps": steps}),
                        Path(folder) / "t", cpu=True, console=Console(quiet=True))  # fmt: skip
            times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / STEPS


def main() -> None:
    for config in CONFIGS:
        options = checked(TrainOptions, {"config": config, "block_length": 256, "batch_size": 4, "save_every": 1000})
        model = fresh_model(architecture(config), 0)
        device = this_device(model.config.hidden_size, options.batch_size * options.block_length)
        predicted = Cost(model, options).seconds_of_step(device, utilization=1.0)
        measured = statistics.median(step_seconds(config, options) for _ in range(ROUNDS))
        print(f"{config}: predicted {predicted:.2f} s, measured {measured:.2f} s, ratio {measured / predicted:.2f} "
              f"({device.half / 1e9:.0f} GFLOP/s, {device.bandwidth / 1e9:.1f} GB/s)", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
