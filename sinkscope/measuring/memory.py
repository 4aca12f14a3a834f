"""How many tokens fit into memory at once, and the memory of a run: estimates from the sizes of a model's weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.family import vocabulary
from sinkscope.models.files import gigabytes
from sinkscope.models.loading import COUNTS, stays_on_cpu
from sinkscope.models.memory import free_memory
from sinkscope.options.measuring import DEMO_NAME, DEVICE_POLICIES

USABLE = 0.8  # share of the free memory that a pass may take
# What a pass keeps of a token, in sizes of the inputs and outputs of linear layers: norms, residual sums, activation
# functions and the tensors of attention come to about half of these. Peaks that were measured (tests/measuring/
# test_memory.py) are below it.
KEPT_OF_TOKEN = 1.5
# Where --batch-size auto starts, if memory allows. An accelerator launches as many kernels for a small batch as for a
# large one. On a CPU, SmolLM2-135M is 7 % faster by 2,048 tokens than by 512; with gradients it is not (-3 to +15 %),
# and takes 2.4 GB more.
TOKENS_PER_BATCH = 16384
TOKENS_ON_CPU = {False: 2048, True: 512}  # by whether there are gradients
HALF_ON_CPU = 3  # bytes of a number in half precision, with the float32 in which most CPUs compute
QUESTION_TOKENS = 128  # approximate length of a question of a benchmark
FEWEST_TOKENS = 16  # the shortest sequences that are proposed where longer ones do not fit
LIBRARY_BYTES = 500 << 20  # bytes of a process on the CPU that has imported the libraries and opened a model of no size
TOKENIZER = 2 << 10  # bytes for each token of a vocabulary, which a tokenizer takes: 480 MB of Gemma 3 from GGUF


def sequences_that_fit(
    model: PreTrainedModel, longest: int, backward: bool, on_cpu: bool | None = None, free: int | None = None
) -> int:
    """Return how many sequences of a length --batch-size auto starts with: as many as are fast and fit, at least 1.

    `on_cpu` is where the pass will run; None: where the model is.
    """
    on_cpu = model.device.type in ("cpu", "meta") if on_cpu is None else on_cpu
    tokens = TOKENS_ON_CPU[backward] if on_cpu else TOKENS_PER_BATCH
    return max(1, min(tokens, tokens_that_fit(model, backward, free)) // longest)


def tokens_that_fit(model: PreTrainedModel, backward: bool, free: int | None = None) -> int:
    """Return how many tokens of a pass fit into the free memory (None: of the model's first device); at least 1."""
    free = free_memory(model.device) if free is None else free
    return max(1, int(USABLE * free / bytes_per_token(model, backward)))


def bytes_per_token(model: PreTrainedModel, backward: bool, size: int | None = None) -> float:
    """Estimate the memory of a pass for each token: of one layer and the logits, or with gradients of all layers.

    `size` is that of a number in bytes, by default the model's.
    """
    size, logits = size or model.dtype.itemsize, vocabulary(model)
    config: Any = model.config.get_text_config()
    modules: Iterator[Any] = model.modules()
    widths = 0  # of the inputs and outputs of every linear map that a token passes, except embeddings and logits
    for module in modules:
        if module is model.get_output_embeddings() or isinstance(module, nn.Embedding):
            continue
        if isinstance(getattr(module, "in_features", None), int) and hasattr(module, "out_features"):
            widths += module.in_features + module.out_features
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:  # a token passes only a few experts of (E,D,F)
                of_token = getattr(config, "num_experts_per_tok", None) or len(parameter)
                widths += sum(parameter.shape[-2:]) * (of_token if parameter.dim() > 2 else 1)
    if backward:  # the logits and their gradient
        return size * (KEPT_OF_TOKEN * widths + 2 * logits)
    return 4 * KEPT_OF_TOKEN * widths / config.num_hidden_layers + size * logits  # reduced in float32


# --- the memory of a run, estimated before its model is loaded


@dataclass(frozen=True)
class Memory:
    """The memory that a run needs, estimated from its options and a model, which may be on the meta device."""

    model: PreTrainedModel
    options: Any
    backward: bool  # whether it measures gradients
    free: int  # bytes, without the weights

    @property
    def on_cpu(self) -> bool:
        kind = self.model.device.type
        return stays_on_cpu(self.options.device_map) if kind == "meta" else kind == "cpu"

    def __str__(self) -> str:
        """Return for example «7.8 GiB; 10.8 GiB in float32»."""
        dtype = self.model.dtype
        other = torch.float32 if dtype.itemsize < 4 else torch.bfloat16
        return f"{gigabytes(self.peak(dtype))}; {gigabytes(self.peak(other))} in {dtype_name(other)}"

    def weights(self, dtype: torch.dtype) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters()) * dtype.itemsize

    def peak(self, dtype: torch.dtype) -> int:
        """Return the most bytes at once: of the libraries, on a CPU, the weights, and a batch."""
        weights, size = self.weights(dtype), self.options.batch_size
        length = getattr(self.options, "seq_len", QUESTION_TOKENS)
        if size == "auto":
            free = max(0, self.free - weights)
            size = sequences_that_fit(self.model, length, self.backward, self.on_cpu, free)
        tokens = min(size, getattr(self.options, "num_seqs", size)) * length
        itemsize = max(dtype.itemsize, HALF_ON_CPU) if self.on_cpu else dtype.itemsize
        batch = tokens * bytes_per_token(self.model, self.backward, itemsize)
        if not self.on_cpu:
            return int(weights + batch)
        largest = max(parameter.numel() for parameter in self.model.parameters())
        process = LIBRARY_BYTES + TOKENIZER * vocabulary(self.model)
        return int(process + weights + max(batch, largest * torch.float32.itemsize))  # while it is loaded or measured

    def least(self, dtype: torch.dtype, **changed: Any) -> int:
        """Return the bytes of weights and the smallest batch, in which gradients take no more than a forward pass.

        `changed` are options in place of the given ones.
        """
        options = self.options.model_copy(update=changed)
        size = 1 if options.batch_size == "auto" else min(options.batch_size, options.num_seqs)
        return int(self.weights(dtype) + size * options.seq_len * bytes_per_token(self.model, False, dtype.itemsize))

    def check(self) -> None:
        """Raise InputError if the run does not fit into memory; it names what would."""
        dtype, options = self.model.dtype, self.options
        needed = self.least(dtype)
        if needed <= self.free:
            return
        fewer = int((self.free - self.weights(dtype)) / max(1, needed - self.weights(dtype)) * options.seq_len)
        fitting = {
            "--dtype bfloat16": dtype.itemsize > 2 and self.least(torch.bfloat16) <= self.free,
            "--batch-size 1": self.least(dtype, batch_size=1) <= self.free,
            f"--seq-len {fewer}": fewer >= FEWEST_TOKENS,
            "--device-map auto": options.device_map not in (None, *DEVICE_POLICIES) and needed <= room(None),
        }
        advice = " or ".join(option for option, fits in fitting.items() if fits)
        raise InputError(
            f"{options.model or DEMO_NAME} needs {gigabytes(needed)} of memory ({gigabytes(self.weights(dtype))} of "
            f"weights in {dtype_name(dtype)}), and {gigabytes(self.free)} are free: "
            f"{advice or 'no other --dtype, --seq-len or --device-map'} would fit; --force goes on all the same"
        )


def room(device_map: str | None) -> int:
    """Return the free bytes of the devices over which a device map spreads a model; of None, those of auto."""
    named = (device_map or "").partition(":")[0]
    if stays_on_cpu(device_map) or (named in COUNTS and not COUNTS[named]()):
        return free_memory(torch.device("cpu"))
    if device_map not in (None, *DEVICE_POLICIES):
        return free_memory(torch.device(device_map))
    kind = "cuda" if torch.cuda.is_available() else "xpu"
    devices = [torch.device(kind, index) for index in range(torch.get_device_module(kind).device_count())]
    return sum(map(free_memory, (*devices, torch.device("cpu"))))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
