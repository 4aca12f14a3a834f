"""Checkpoints with quantized weights: the packages that read them, and the operations that their models allow.

If transformers can dequantize the weights while it loads them, they are dequantized, as for a GGUF file: the layers are
then ordinary ones, with correct gradients and editable weights, and no kernel is downloaded. A checkpoint's settings
for rounding activations then have no effect. The other methods compute on packed weights: such a model can be measured,
but its weights cannot be edited or trained. So do fp8 and MXFP4 where a GPU is too small for the dequantized weights,
if the user permits kernels from the hub (`_placed` in loading.py).
"""

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, __version__
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import is_kernels_available

from sinkscope.errors import InputError, SinkscopeError, unknown

DEQUANTIZED = ", dequantized"  # the end of `stored_as`
BY_KERNELS = ("fp8", "mxfp8", "mxfp4")  # methods that can also compute on packed weights, by kernels from the hub
UNPACKED = ("compressed-tensors", "fp8", "mxfp8", "mxfp4", "metal")  # methods that are dequantized while loading
ALIKE = ("bitsandbytes", "compressed-tensors", "torchao", "hqq", "auto-round", "aqlm", "vptq")  # named like the package
PACKAGES = {  # method → the packages that transformers needs to load it
    **{method: (method,) for method in ALIKE},
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
    "quanto": ("optimum-quanto",),
    "quark": ("amd-quark",),
}
REFUSED = {"eetq": "its kernels are code that would be downloaded from the hub and run"}
BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp8": 8, "mxfp4": 4, "nvfp4": 4}  # bits of the methods with a fixed number
SCALES = 0.25  # bits of a packed weight's share of its block's scale, at most
ORDINARY = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PLAIN: tuple[type, ...] = (nn.Parameter, torch.Tensor)  # types of weights that hold their numbers as they are
AGREEING = 0.1  # largest relative error of a linear layer's gradient


def method_of(settings: Mapping[str, Any]) -> str | None:
    """Return the quantization method that a config.json names, if any."""
    given = settings.get("quantization_config")
    if not isinstance(given, dict):
        return None
    bitsandbytes = given.get("load_in_4bit") or given.get("load_in_8bit")
    return str(given.get("quant_method") or ("bitsandbytes" if bitsandbytes else None))


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


def stored_as(settings: Mapping[str, Any]) -> str | None:
    """Return how weights are stored, such as "4-bit gptq" or "8-bit fp8, dequantized"; None if not quantized."""
    method = method_of(settings)
    if method is None:
        return None
    given = settings["quantization_config"]
    in_4, in_8 = (given.get(f"load_in_{bits}bit") for bits in (4, 8))
    bits = BITS.get(method) or (4 if in_4 else 8 if in_8 else None)
    if not bits:
        groups = given.get("config_groups")
        parts = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else [given]
        bits = next((found for part in parts if (found := part.get("num_bits") or part.get("bits"))), None)
    return f"{f'{bits}-bit ' if bits else ''}{method}{DEQUANTIZED if method in UNPACKED else ''}"


def unpacking(config: Any) -> None:
    """Change the configuration so that transformers dequantizes the weights while it loads them, if it can."""
    given = getattr(config, "quantization_config", None)
    if isinstance(given, dict) and method_of({"quantization_config": given}) in UNPACKED:
        config.quantization_config = given | {"dequantize": True}


def runs_packed(config: Any) -> bool:
    """Return whether transformers can compute on a checkpoint's packed weights on this machine's GPU."""
    given = getattr(config, "quantization_config", None)
    if not isinstance(given, dict) or given.get("quant_method") not in BY_KERNELS or not is_kernels_available():
        return False
    quantizer: Any = AutoHfQuantizer.from_config(given | {"dequantize": False}, pre_quantized=True)
    with suppress(Exception):  # it raises, or decides to dequantize, where the GPU or a package is missing
        quantizer.validate_environment(device_map="cuda")
        return not quantizer.quantization_config.dequantize
    return False


def packed_bytes(model: PreTrainedModel, config: Any) -> int:
    """Return about how many bytes the weights of a model on the meta device take as its checkpoint packs them."""
    settings, total = config.quantization_config, 0.0
    size = (BITS[settings["quant_method"]] + SCALES) / 8
    plain = [*(settings.get("modules_to_not_convert") or ()), "lm_head"]
    for path, module in model.named_modules():
        is_packed = not isinstance(module, nn.Embedding) and should_convert_module(path, plain)
        for parameter in module.parameters(recurse=False):
            total += parameter.numel() * (size if is_packed and parameter.dim() > 1 else parameter.itemsize)
    return int(total)


def is_ordinary(weight: Any) -> bool:
    """Return whether a weight is a plain floating-point tensor, neither packed nor quantized."""
    return type(weight) in PLAIN and weight.dtype in ORDINARY


def is_quantized(model: PreTrainedModel) -> bool:
    """Return whether a model computes on quantized weights, according to transformers or to a linear layer."""
    weights = ((module, getattr(module, "weight", None)) for module in model.modules())
    # torch's own quantized layers are no Linear, and have a method in the place of the weight
    of_linear = [
        weight for module, weight in weights if isinstance(module, nn.Linear) or isinstance(weight, MethodType)
    ]
    return bool(getattr(model, "is_quantized", False)) or not all(map(is_ordinary, of_linear))


def is_packed(model: PreTrainedModel) -> bool:
    """Return whether weights are unpacked in the model's first run, as by compressed-tensors."""
    linear = (getattr(module, "weight", None) for module in model.modules() if type(module) is nn.Linear)
    return any(weight is None or (type(weight) is nn.Parameter and weight.dtype not in ORDINARY) for weight in linear)


def check_not_quantized(model: PreTrainedModel, purpose: str) -> None:
    """Raise InputError if a model computes on quantized weights, which `purpose` cannot use."""
    if is_quantized(model):
        raise InputError(f"{purpose} needs weights that are not quantized: load the model in float32 or bfloat16")


def without_gradients(model: PreTrainedModel) -> str | None:
    """Return why the gradients of a model with quantized weights are wrong; None if they are right.

    Rounded activations have a gradient of zero, and some kernels have none. A linear layer f without its bias computes
    f(x) = W x, so the gradient g of u · f at x has to satisfy g · x = u · f(x).
    """
    if not is_quantized(model):
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
        given = module(x)
        with torch.no_grad():
            linear = given - module(torch.zeros_like(x))
        try:
            (gradient,) = torch.autograd.grad(given, x, linear)
        except RuntimeError:  # a tensor that is not part of the graph
            return False
    computed = float(linear.double().square().sum())
    return abs(float((gradient.double() * x.detach().double()).sum()) - computed) <= AGREEING * computed
