"""Estimate what measuring large models costs on a GPU, from counts: `python tests/benchmarks/scale.py`.

No GPU and no weights are needed: the operations of a pass run on tensors without data, on a simulated device that
chooses CUDA's kernels. It prints, by model, shape and variant:

- launches of kernels, the times that the CPU waits for the device, and copies between the two, per pass;
- traffic: the bytes that each kernel reads and writes, as if nothing stayed in a cache, per pass;
- memory above the weights at the peak of a pass;
- an estimate of the time: the larger of launches × `LAUNCH` and the sum over kernels of the larger of bytes ÷
  `BANDWIDTH` and multiplications ÷ `FLOPS`.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import bare_backward, bare_forward, random_batch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary, weakref
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.simulated import NAME, Device, Simulated, counting, is_launch, simulated

from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.families import find_family

# an H100 SXM: its data sheet's numbers × what large kernels reach of them, and a launch from Python
BANDWIDTH = 0.8 * 3.35e12  # bytes a second
FLOPS = 0.6 * 989e12  # of dense bfloat16, a multiplication and an addition being two
LAUNCH = 5e-6  # seconds

LLAMA: dict[str, Any] = {"vocab_size": 32_000, "max_position_embeddings": 32_768}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name → model type and configuration
    "Llama-2-7B": ("llama", LLAMA),
    "Llama-2-70B": (
        "llama",
        LLAMA | {
            "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
    "gpt-oss-120b": ("gpt_oss", {}),
}  # fmt: skip
SHAPES = ((8, 64), (8, 2048), (1, 32_768))
FORWARD = ("attention", "geometry", "activation", "massive", "outlier")
VARIANTS: dict[str, tuple[str, ...] | None] = {  # name → observables; None: the bare pass
    "bare forward": None,
    "attention + activation": ("attention", "activation"),
    "all forward": FORWARD,
    "bare forward + backward": None,
    "gradient": ("gradient",),
}


@dataclass
class Work:
    """The work of a pass, beyond what `counting` counts."""

    bytes: int = 0
    seconds: float = 0.0  # on the device
    live: int = 0
    peak: int = 0
    known: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def see(self, func: Any, arguments: tuple, named: dict[str, Any], output: Any) -> None:
        read = [x for x in pytree.tree_leaves((arguments, named)) if isinstance(x, torch.Tensor)]
        made = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and x.device.type == "meta"]
        for x in read:  # weights, and what earlier batches left: not of this pass
            self.known[x.untyped_storage()] = True
        for x in made:
            storage = x.untyped_storage()
            if storage not in self.known:
                self.known[storage] = True
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage.nbytes())
        if is_launch(func):
            moved = sum(x.numel() * x.element_size() for x in (*read, *made))
            count = flop_registry.get(func._overloadpacket, lambda *_, **__: 0)
            arguments = tuple(x for x in arguments if not isinstance(x, torch.dtype))  # of a product's result
            self.bytes += moved
            self.seconds += max(moved / BANDWIDTH, count(*arguments, **named, out_val=output) / FLOPS)

    def _free(self, size: int) -> None:
        self.live -= size


@contextmanager
def without_data() -> Iterator[None]:
    """Simulated devices whose tensors have sizes and no data, so that no check of them is done."""
    Device.holds = torch.device("meta")
    try:
        with simulated(), patch.object(Tracer, "check_finite", lambda self: None):
            yield
    finally:
        Device.holds = torch.device("cpu")


def on_device(model: PreTrainedModel) -> PreTrainedModel:
    """Move a model without data to the simulated device."""
    place = torch.device(NAME, 0)
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None:
                module._parameters[name] = torch.nn.Parameter(Simulated(own.data, place), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Simulated(buffer, place)
    model.tie_weights()
    return model


def counts_of(model: PreTrainedModel, shape: tuple[int, int], variant: str) -> tuple[Counter[str], Work]:
    """Count the second of two passes, when sums over batches exist."""
    names, backward = VARIANTS[variant], variant in ("gradient", "bare forward + backward")
    batch, settings, work = random_batch(shape), Settings(positions=16, window=64), Work()

    def counted(one_pass: Callable[[], object]) -> tuple[Counter[str], Work]:
        one_pass()
        with counting() as counts:
            Device.watch = work.see
            try:
                one_pass()
            finally:
                Device.watch = None
        return counts, work

    with open_tracer(model, find_family(model)) as tracer:  # also for the bare pass, so that it has fused attention
        if names is None:
            ids = batch.token_ids.to(model.device)
            return counted(partial(bare_backward if backward else bare_forward, model, ids))
        made = [OBSERVABLES[name](settings) for name in names]
        for observable in made:
            observable.prepare(model, tracer.family, 1)
        return counted(partial(tracer.forward_backward if backward else tracer.forward, batch, made))


def row(name: str, shape: tuple[int, int], variant: str) -> str:
    kind, config = MODELS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.bfloat16)
    counts, work = counts_of(on_device(model.eval().requires_grad_(False)), shape, variant)
    launches = counts["launches"]
    return (
        f"| {name} | {shape[0]} × {shape[1]:,} | {variant} | {launches:,} "
        f"({launches / model.config.num_hidden_layers:.0f}) | {counts['synchronizations']} | {counts['copies']} | "
        f"{work.bytes / 1e9:,.0f} | {work.peak / 1e9:.1f} | {1e3 * work.seconds:,.0f} | "
        f"{1e3 * max(launches * LAUNCH, work.seconds):,.0f} |"
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--shape", type=int, nargs=2, action="append")
    parser.add_argument("--variant", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    arguments = parser.parse_args()
    print("| model | shape | pass | launches (a layer) | waits | copies | GB moved | GB held | ms of device | ms |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with without_data():
        for name in arguments.model:
            for shape in map(tuple, arguments.shape or SHAPES):
                for variant in arguments.variant:
                    print(row(name, shape, variant), flush=True)


if __name__ == "__main__":
    main()
