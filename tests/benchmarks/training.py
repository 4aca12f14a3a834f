"""Cost of a training step with each retrofit, compared with the plain fine-tune: `python tests/benchmarks/training.py`.

A step is the Trainer's: forward, loss, backward, clipping of gradients, AdamW with our groups. The plain model and one
with a retrofit run steps in turn in one process, so that a change of the machine's speed affects both equally; the
ratio is the median over rounds. It is the cost of a method only if nothing else is running.
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
from sinkscope.options.training import TrainingConfig
from sinkscope.retrofits import retrofit_model
from sinkscope.training.arms import Method, parse_methods
from sinkscope.training.trainer import _arguments, parameter_groups

METHODS = "vscale,vga,vga:placement=output,iga,iga:placement=output,none"  # the last, plain again, shows the precision
SHAPES = ((8, 64), (4, 256))
CONFIG = TrainingConfig()


def training_step(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], float]:
    """Return a function that runs one step of the optimizer and returns its seconds."""
    model.train().requires_grad_(True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(CONFIG, folder, kept=1, cpu=True)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    optimizer = kind(parameter_groups(model, CONFIG), **options)

    def step() -> float:
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        model.zero_grad()
        return time.perf_counter() - start

    return step


def report(model: PreTrainedModel, method: Method, shapes: list[tuple[int, int]], rounds: int) -> None:
    retrofitted = retrofit_model(copy.deepcopy(model), None, method.name, **method.parameters)
    for batch, length in shapes:
        ids = random_batch((batch, length)).token_ids
        plain, changed = training_step(copy.deepcopy(model), ids), training_step(retrofitted, ids)
        plain(), changed()  # warm up
        pairs = [(plain(), changed()) for _ in range(rounds)]
        ratio = statistics.median(ours / base for base, ours in pairs)
        ours, base = (1e3 * statistics.median(times) for times in ([b for _, b in pairs], [a for a, _ in pairs]))
        print(f"  {method.label:<22} {batch} × {length:<6} {base:8.0f} ms {ours:8.0f} ms   {ratio:5.3f} ×", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--method", default=METHODS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shape", type=int, nargs=2)
    arguments = parser.parse_args()
    model = sinkscope.models.loading.load(arguments.model, dtype="float32").model
    shapes = list(SHAPES) if arguments.shape is None else [tuple(arguments.shape)]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, median of {arguments.rounds} rounds")
    print(f"  {'':<36} {'plain':>8} {'retrofitted':>14}")
    for method in parse_methods(arguments.method):
        report(model, method, shapes, arguments.rounds)


if __name__ == "__main__":
    main()
