"""The loss of a model in a number format, with PyTorch's own hooks."""

import copy
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tiny import tiny_tokens
from torch import nn

from sinkscope.quantization.formats import Encoding
from sinkscope.quantization.rounding import snap

TEXTS = tiny_tokens(9, 24)  # six are evaluated, and three calibrate
SMALL: dict[str, Any] = {
    "input": list(TEXTS.numpy()), "num_seqs": 6, "seq_len": 24, "calibration": 3, "figures": (), "page": False,
}  # fmt: skip
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # which servers fuse


def plain_loss(
    model: Any,
    weights: Encoding | None = None,
    inputs: Encoding | None = None,
    spared: torch.Tensor | None = None,
    exact: Collection[str] = (),
    prefix: Collection[int] = (),
    masked: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> float:
    """Return the loss of the first six texts, predicted tokens being those without a prefix.

    Args:
        weights, inputs: Formats of linear layers; static ranges are those of the last three texts.
        spared: Tokens whose inputs stay in full precision and out of the ranges (9,24).
        exact: Paths of modules that stay in full precision.
        prefix: Token ids before every text, which are spared.
        masked: For an encoder: the texts with masked tokens, and the tokens to be predicted, -100 elsewhere (9,24).
    """
    texts = torch.cat([torch.tensor([[*prefix]], dtype=torch.long).expand(len(TEXTS), -1), TEXTS], 1)
    if spared is None:
        spared = torch.arange(texts.shape[1]).expand(9, -1) < len(prefix)
    calibrating, labels = texts[6:], F.pad(TEXTS[:, 1:], (0, 1), value=-100)
    if masked is not None:
        (texts, labels), calibrating = masked, torch.cat([TEXTS[6:], masked[0][6:]])  # as they are, and masked
    linear = {path: module for path, module in model.named_modules()
              if isinstance(module, nn.Linear) and module is not model.get_output_embeddings()}  # fmt: skip
    largest: dict[str, float] = {}

    quantized, ranging = ~spared[:6, :, None], ~spared[6:].repeat(len(calibrating) // 3, 1).flatten()

    def see(path: str, module: nn.Module, args: tuple) -> None:
        largest[path] = float(args[0].flatten(0, -2)[ranging].abs().max())

    def rounded(path: str, module: nn.Module, args: tuple) -> torch.Tensor:
        (x,) = args
        return torch.where(quantized, snap(inputs, x, largest[path] if inputs.dynamic is not True else None), x)

    with torch.no_grad():
        seeing = [module.register_forward_pre_hook(partial(see, path)) for path, module in linear.items()]
        model(calibrating)
        for hook in seeing:
            hook.remove()
        model = copy.deepcopy(model)
        for path, module in model.named_modules():
            if path not in linear or path in exact:
                continue
            if weights is not None:
                parent, name = path.rsplit(".", 1)
                fused = next((names for names in SIBLINGS if name in names), (name,))
                most = max(float(linear[f"{parent}.{sibling}"].weight.abs().max()) for sibling in fused)
                module.weight.data = snap(weights, module.weight, most if weights.strategy == "tensor_group" else None)
            if inputs is not None:
                module.register_forward_pre_hook(partial(rounded, path))
        logits = model(texts[:6]).logits[:, len(prefix) :].double()
    return float(F.cross_entropy(logits.flatten(0, 1), labels[:6].flatten()))
