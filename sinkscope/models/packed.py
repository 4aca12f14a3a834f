"""Checkpoints whose weights are packed: the packages that read them, and the operations that their models allow.

Their weights are quantized. If transformers can dequantize them while it loads them, they are dequantized, as for a
GGUF file: the layers are then ordinary ones, with correct gradients and editable weights, and no kernel is downloaded.
A checkpoint's settings for rounding activations then have no effect. The other methods compute on packed weights: such
a model can be measured, but its weights cannot be edited or trained. So do fp8 and MXFP4 where a GPU is too small for
the dequantized weights, if the user permits kernels from the hub (`_place_for` in loading.py).
"""

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions
from itertools import chain
from types import MethodType
from typing import Any

import torch
from gguf import LlamaFileType
from torch import nn
from transformers import GgufConfig, PreTrainedModel, __version__
from transformers.integrations.gguf import read_gguf_metadata
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import is_kernels_available

from sinkscope.errors import InputError, SinkscopeError, unknown

PACKING = "quantization_config"  # an entry of config.json, and an attribute of a model's configuration
DEQUANTIZED = ", dequantized"  # the end of `stored_precision`
BY_KERNELS = ("fp8", "mxfp8", "mxfp4")  # methods that can also compute on packed weights, by kernels from the hub
UNPACKED = ("compressed-tensors", "fp8", "mxfp8", "mxfp4", "metal")  # methods that are dequantized while loading
PACKAGES = {  # method → the packages that transformers needs to load it
    **{
        method: (method,)
        for method in ("bitsandbytes", "compressed-tensors", "torchao", "hqq", "auto-round", "aqlm", "vptq")
    },
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
    "quanto": ("optimum-quanto",),
    "quark": ("amd-quark",),
}
REFUSED = {"eetq": "its kernels are code that would be downloaded from the hub and run"}
METHOD_BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp8": 8, "mxfp4": 4, "nvfp4": 4}  # methods with a fixed number of bits
SCALES = 0.25  # at most this many bits per packed weight for the scale of its block
ORDINARY = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ORDINARY_TYPES: tuple[type, ...] = (nn.Parameter, torch.Tensor)  # types of weights that are not packed
PACKED_WEIGHTS = "weights are quantized"  # in messages
ROUNDED_ACTIVATIONS = 5e-2  # largest difference where activations are rounded to 8 bits: one step more or less
AGREEING = 0.1  # largest relative error of a linear layer's gradient


def method_of(settings: Mapping[str, Any]) -> str | None:
    """Return the quantization method that a config.json names, if any."""
    packing = settings.get(PACKING)
    if not isinstance(packing, dict):
        return None
    bitsandbytes = packing.get("load_in_4bit") or packing.get("load_in_8bit")
    return str(packing.get("quant_method") or ("bitsandbytes" if bitsandbytes else None))


def check_packages(source: str, settings: Mapping[str, Any]) -> None:
    """Raise InputError or, for a missing package, SinkscopeError if a quantized checkpoint cannot be loaded here."""
    method = method_of(settings)
    if method is None:
        return
    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    if method not in known:
        raise InputError(
            f"{source} is quantized in a way that transformers {__version__} does not read: "
            f"{unknown(method, sorted(known))}"
        )
    if method in REFUSED:
        raise InputError(f"{source} is quantized by {method}, which is not measured: {REFUSED[method]}")
    installed = {str(package.name).lower().replace("_", "-") for package in distributions()}
    missing = [package for package in PACKAGES.get(method, ()) if package not in installed]
    if missing:
        raise SinkscopeError(
            f"{source} is quantized by {method}, which needs a package that is not installed: "
            f"pip install {' '.join(missing)}"
        )


def stored_precision(settings: Mapping[str, Any]) -> str | None:
    """Return how weights are stored, such as "4-bit gptq" or "8-bit fp8, dequantized"; None if not quantized."""
    method = method_of(settings)
    if method is None:
        return None
    packing = settings[PACKING]
    in_4, in_8 = (packing.get(f"load_in_{bits}bit") for bits in (4, 8))
    bits = METHOD_BITS.get(method) or (4 if in_4 else 8 if in_8 else None)
    if not bits:
        groups = packing.get("config_groups")
        parts = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else [packing]
        bits = next((number for part in parts if (number := part.get("num_bits") or part.get("bits"))), None)
    return f"{f'{bits}-bit ' if bits else ''}{method}{DEQUANTIZED if method in UNPACKED else ''}"


def gguf_precision(path: str) -> str:
    """Return how most weights of a GGUF file are stored, such as "Q4_1 (GGUF, dequantized)"."""
    metadata, _ = read_gguf_metadata(path)
    kinds: dict[Any, str] = {kind.value: kind.name.split("_", 1)[-1] for kind in LlamaFileType}
    return f"{kinds.get(metadata.get('general.file_type'), '?')} (GGUF, dequantized)"


def measured_precision(stored: str, model: PreTrainedModel) -> str:
    """Return how weights are stored, without ", dequantized" if the model has packed weights."""
    return stored.removesuffix(DEQUANTIZED) if is_packed(model) else stored


def gguf_options(path: str) -> dict[str, Any]:
    """Return the options with which transformers reads a GGUF file and unpacks it."""
    # otherwise the model would count as quantized and could not be cast or saved
    return {"gguf_file": path, PACKING: GgufConfig(dequantize=True)}


def set_unpacking(config: Any, unpacks: bool) -> None:
    """Let transformers unpack (or not) the weights of a configuration's model while it loads them, if it can."""
    packing = getattr(config, PACKING, None)
    if isinstance(packing, dict) and method_of({PACKING: packing}) in UNPACKED:
        setattr(config, PACKING, packing | {"dequantize": unpacks})


def without_packing(config: Any) -> None:
    """Remove the settings of packed weights from a configuration."""
    if hasattr(config, PACKING):
        delattr(config, PACKING)


def runs_packed(config: Any) -> bool:
    """Return whether transformers can compute on a checkpoint's packed weights on this machine's GPU."""
    packing = getattr(config, PACKING, None)
    if not isinstance(packing, dict) or packing.get("quant_method") not in BY_KERNELS or not is_kernels_available():
        return False
    quantizer: Any = AutoHfQuantizer.from_config(packing | {"dequantize": False}, pre_quantized=True)
    with suppress(Exception):  # it raises, or decides to dequantize, where the GPU or a package is missing
        quantizer.validate_environment(device_map="cuda")
        return not quantizer.quantization_config.dequantize
    return False


def packed_bytes(model: PreTrainedModel, config: Any) -> int:
    """Return about how many bytes the weights of a model on the meta device take as its checkpoint packs them."""
    packing, total = getattr(config, PACKING), 0.0
    size = (METHOD_BITS[packing["quant_method"]] + SCALES) / 8
    plain = [*(packing.get("modules_to_not_convert") or ()), "lm_head"]
    for path, module in model.named_modules():
        packs = not isinstance(module, nn.Embedding) and should_convert_module(path, plain)
        for parameter in module.parameters(recurse=False):
            total += parameter.numel() * (size if packs and parameter.dim() > 1 else parameter.itemsize)
    return int(total)


def is_ordinary(weight: Any) -> bool:
    """Return whether a weight is a plain floating-point tensor, neither packed nor quantized."""
    return type(weight) in ORDINARY_TYPES and weight.dtype in ORDINARY


def check_ordinary(module: Any) -> None:
    """Raise InputError if a module's weight is quantized; an adapter is allowed."""
    if not hasattr(module, "weight") or not is_ordinary(module.weight):
        raise InputError(f"its {PACKED_WEIGHTS}: load it in float32, bfloat16 or float16")


def is_packed(model: PreTrainedModel) -> bool:
    """Return whether a model computes on quantized weights, according to transformers or to a linear layer."""
    weights = ((module, getattr(module, "weight", None)) for module in model.modules())
    # torch's own quantized layers are not nn.Linear, and have a method named `weight`
    of_linear = [
        weight for module, weight in weights if isinstance(module, nn.Linear) or isinstance(weight, MethodType)
    ]
    return bool(getattr(model, "is_quantized", False)) or not all(map(is_ordinary, of_linear))


def packed_tolerance(model: PreTrainedModel) -> float:
    """Return the largest difference of the outputs of packed weights by rounded activations; 0 for other weights."""
    return ROUNDED_ACTIVATIONS if is_packed(model) else 0.0


def unpacks_when_run(model: PreTrainedModel) -> bool:
    """Return whether weights are unpacked in the model's first run, as by compressed-tensors."""
    linear = (getattr(module, "weight", None) for module in model.modules() if type(module) is nn.Linear)
    return any(weight is None or (type(weight) is nn.Parameter and weight.dtype not in ORDINARY) for weight in linear)


def check_not_packed(model: PreTrainedModel, purpose: str) -> None:
    """Raise InputError if a model computes on quantized weights, which `purpose` cannot use."""
    if is_packed(model):
        raise InputError(f"{purpose} needs weights that are not quantized: load the model in float32 or bfloat16")


def without_gradients(model: PreTrainedModel) -> str | None:
    """Return why the gradients of a model with quantized weights are wrong; None if they are right.

    Rounded activations have a gradient of zero, and some kernels have none. A linear layer f without its bias computes
    f(x) = W x, so the gradient g of u · f at x has to satisfy g · x = u · f(x).
    """
    if not is_packed(model):
        return None
    seen: set[tuple[type, type]] = set()
    for path, module in model.named_modules():
        if type(module).__module__.startswith("transformers.integrations.") and "Experts" in type(module).__name__:
            return f"its quantized experts ({path}) are no linear layers, whose gradient could be checked"
        kind = (type(module), type(getattr(module, "weight", None)))
        tensor = next(chain(module.parameters(), module.buffers()), None)
        if kind in seen or not isinstance(getattr(module, "in_features", None), int):
            continue
        seen.add(kind)
        device = model.device if tensor is None else tensor.device  # dynamic int8 has its weights in no tensor
        if device.type != "meta" and not _has_right_gradient(module, device, model.dtype):
            return f"the gradient of its quantized layers ({path}) does not match their outputs"
    return None


def _has_right_gradient(module: Any, device: torch.device, dtype: torch.dtype) -> bool:
    x = torch.randn(1, module.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(device, dtype).requires_grad_()
    with torch.enable_grad():
        output = module(x)
        with torch.no_grad():
            linear = output - module(torch.zeros_like(x))
        try:
            (gradient,) = torch.autograd.grad(output, x, linear)
        except RuntimeError:  # a tensor that is not part of the graph
            return False
    computed = float(linear.double().square().sum())
    return abs(float((gradient.double() * x.detach().double()).sum()) - computed) <= AGREEING * computed
