"""Cost of a training step with each retrofit, attention operation or positional scheme, compared with the plain one.

    python tests/benchmarks/training.py [MODEL]        # retrofits of a pretrained model, in seconds
    python tests/benchmarks/training.py --operations   # operations and schemes of a new model, by one thread's CPU time

A step is the Trainer's, with our groups of parameters. Both models run steps in turn in one process; the ratio is the
median over rounds. The operation `softmax` is the cost of the chunked path alone: the same without the fused kernel.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from common import random_batch
from transformers import PreTrainedModel, Trainer

import sinkscope.models.loading
from sinkscope.commands.train.architectures import architecture, fresh_model
from sinkscope.commands.train.arms import parse_methods
from sinkscope.commands.train.options import TrainingConfig
from sinkscope.commands.train.trainer import parameter_groups, training_arguments
from sinkscope.models.families import find_family
from sinkscope.retrofits import retrofit_model
from sinkscope.retrofits.operation import OPERATION_KINDS

METHODS = "vscale,vga,vga:placement=output,iga,iga:placement=output,none"  # the last, plain again, shows the precision
SHAPES = ((8, 64), (4, 256))
SCHEMES = ("none", "absolute", "learned", "relative", "alibi", "rotary")
ARCHITECTURE = "llama-1m:num_hidden_layers=6"
CONFIG = TrainingConfig()
TARGET = 1.3  # largest accepted time of an operation's step ÷ that of fused softmax


def training_step(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], None]:
    """Return a function that runs one step of the optimizer."""
    model.train().requires_grad_(True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(CONFIG, folder, limit=1, cpu=True)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    optimizer = kind(parameter_groups(model, CONFIG), **options)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        model.zero_grad()

    return step


def report(
    name: str, changed: PreTrainedModel, plain: PreTrainedModel, ids: torch.Tensor, rounds: int,
    clock: Callable[[], float] = time.process_time, target: float = float("inf"),
) -> None:  # fmt: skip
    """Print the medians over rounds: the plain step, and the other step ÷ the plain one."""

    def seconds(step: Callable[[], None]) -> float:
        start = clock()
        step()
        return clock() - start

    base, own = training_step(copy.deepcopy(plain), ids), training_step(changed, ids)
    base(), own()  # warm up
    pairs = [(seconds(base), seconds(own)) for _ in range(rounds)]
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    shown = f"{1e3 * statistics.median(theirs for theirs, _ in pairs):8.0f} ms {ratio:6.3f} ×"
    print(
        f"  {name:<32} {ids.shape[0]} × {ids.shape[1]:<5} {shown}{'  above the target' * (ratio > target)}", flush=True
    )


def report_operations(config: str, rounds: int, only: list[str]) -> None:
    ids = random_batch((8, 256), (3, 4000)).token_ids
    plain = fresh_model(architecture(config), 0)
    for kind in filter(OPERATION_KINDS.__contains__, only):
        model = fresh_model(architecture(config), 0)
        retrofit_model(model, find_family(model), "operation", kind=kind)
        report(kind, model, plain, ids, rounds, target=TARGET)
    for scheme in filter(SCHEMES.__contains__, only):
        model = fresh_model(architecture(f"{config}{',' if ':' in config else ':'}position_scheme={scheme}"), 0)
        report(f"positions: {scheme}", model, plain, ids, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--method", default=METHODS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shape", type=int, nargs=2)
    parser.add_argument("--operations", nargs="*", metavar="KIND", help="operations and schemes, by default all")
    parser.add_argument("--config", default=ARCHITECTURE, help="of --operations")
    arguments = parser.parse_args()
    if arguments.operations is not None:
        torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, median of {arguments.rounds} rounds")
    if arguments.operations is not None:
        report_operations(arguments.config, arguments.rounds, arguments.operations or [*OPERATION_KINDS, *SCHEMES])
        return
    model = sinkscope.models.loading.load(arguments.model, dtype="float32").model
    for label, (method, parameters) in parse_methods(arguments.method).items():
        changed = retrofit_model(copy.deepcopy(model), None, method, **parameters)
        for shape in [arguments.shape] if arguments.shape else SHAPES:
            ids = random_batch(tuple(shape)).token_ids
            report(label, changed, model, ids, arguments.rounds, time.perf_counter)


if __name__ == "__main__":
    main()
