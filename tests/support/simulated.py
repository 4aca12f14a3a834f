"""Two simulated accelerators, `sim:0` and `sim:1`, whose tensors lie on the CPU: what breaks on a GPU breaks on them.

A tensor of a simulated device wraps a CPU tensor, and every operation on it passes through `_run`. Like CUDA it refuses
operations that mix devices (except numbers, 0-dim tensors of the CPU) and half-precision kernels that CUDA does not
have. `counting` counts kernel launches, synchronizations and copies.

PyTorch has one device type for backends written in Python, PrivateUse1. Autograd knows only one such device, and an
error on its thread ends the process. So the tensors are of another type in C++, `LAZY`; Python code sees `sim`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from accelerate import dispatch_model
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)
from transformers import PreTrainedModel

from sinkscope.attention import kernels
from sinkscope.models import packed
from sinkscope.models.families import find_family

NAME, LAZY = "sim", "lazy"
aten = torch.ops.aten

# operations that return numbers or sizes that depend on the data, for which the host waits
SYNCHRONIZING = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
    *("bincount", "is_nonzero"),
}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "_scaled_dot_product_efficient_attention"}  # in TF32 if that is allowed
TAKES_CPU_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Device:
    """The state of the simulation."""

    is_available = False
    capability: ClassVar = (8, 0)  # Ampere
    free = 2**36  # bytes
    holds = torch.device("cpu")  # where its tensors lie: "meta" for sizes without data
    counts: Counter[str] | None = None
    # is called with each operation and its result
    watch: Callable[[Any, tuple, dict[str, Any], Any], None] | None = None


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return Device.is_available


class _Module(_DummyBackendModule):
    def is_available(self) -> bool:
        return Device.is_available

    def device_count(self) -> int:
        return 2 * Device.is_available

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return Device.free, 2**37

    def memory_reserved(self, device: torch.device) -> int:
        return 0

    memory_allocated = memory_reserved

    def get_rng_state(self, device: int) -> torch.Tensor:
        """Return the state of the CPU's random numbers, from which these devices draw theirs."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        pass  # the CPU's is restored anyway

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.get_rng_state() for _ in range(self.device_count())]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class Simulated(torch.Tensor):
    """A tensor of a simulated device."""

    inner: torch.Tensor
    place: torch.device

    @staticmethod
    def __new__(cls: type, inner: torch.Tensor, place: torch.device) -> "Simulated":
        tensor: Simulated = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(LAZY, place.index),
        )  # fmt: skip
        tensor.inner, tensor.place = inner, place
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        """Return the tensor itself if it is there already, which C++ cannot see: there, the device has another type."""
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        is_there = device is None or _seen_place(device) == self.place
        if is_there and not copy and memory_format is None and dtype in (None, self.dtype):
            return self
        return super().to(*(() if is_there else (device,)), dtype=dtype or self.dtype, copy=copy)

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.inner!r} on {self.place}"


def _seen_place(device: torch.device) -> torch.device:
    """Return the device as Python code sees it."""
    return device if device.type in ("cpu", "meta") else torch.device(NAME, device.index or 0)


def _place_of(x: torch.Tensor) -> torch.device:
    return x.place if isinstance(x, Simulated) else x.device


class _Facts:
    """What an operation's schema says, which is read once."""

    def __init__(self, func: Any) -> None:
        self.name = func._schema.name.removeprefix("aten::")
        arguments, returns = func._schema.arguments, func._schema.returns
        self.written = [
            (at, argument.name)
            for at, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.is_mutable, self.returns = func._schema.is_mutable, len(returns)
        is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        self.is_launch = not (is_view or self.name in FREE or self.name == "_local_scalar_dense")


_facts = cache(_Facts)


def is_launch(func: Any) -> bool:
    """Return whether an operation launches a kernel: views and allocations do not."""
    return _facts(func).is_launch


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _each(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a value with its tensors changed, also those in lists."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)(_each(change, each) for each in value) if type(value) in (list, tuple) else value


def _inner(x: torch.Tensor) -> torch.Tensor:
    return x.inner if isinstance(x, Simulated) else x


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, and return tensors on its device."""
    facts = _facts(func)
    name, tensors = facts.name, [*_tensors((*args, *kwargs.values()))]
    place = _common_place(name, tensors, kwargs.get("device"))
    arguments, named = _each(_inner, args), {key: _each(_inner, value) for key, value in kwargs.items()}
    if "device" in named:
        named["device"] = Device.holds if place.type == NAME else torch.device("cpu")
    if "pin_memory" in named:
        named["pin_memory"] = False
    if Device.counts is not None:
        is_blocking = not (named.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        _count(facts, tensors, place, is_blocking, Device.counts)
    if name in PRODUCTS and torch.get_float32_matmul_precision() != "highest":
        arguments = tuple(
            _to_tf32(x) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in arguments
        )
    output = _without_data(name, arguments, named, place) if Device.holds.type == "meta" else NotImplemented
    if output is NotImplemented:
        output = KERNELS.get(name, func)(*arguments, **named)
    if Device.watch is not None:
        Device.watch(func, arguments, named, output)
    if facts.is_mutable and tensors:  # the same object: the caller may hold it
        written = [args[at] if at < len(args) else kwargs.get(argument) for at, argument in facts.written]
        assert all(x.shape == x.inner.shape for x in written if isinstance(x, Simulated)), f"{name} resized its output"
        return written[0] if facts.returns == 1 else tuple(written) if facts.returns else None
    return output if place.type == "cpu" else _each(lambda x: Simulated(x, place), output)


def _without_data(name: str, arguments: tuple, named: dict[str, Any], place: torch.device) -> Any:
    """Return ones where the CPU reads data that are not there, or NotImplemented."""
    if name in ("_local_scalar_dense", "equal"):
        return name == "_local_scalar_dense" and torch.ones((), dtype=arguments[0].dtype).item()
    if name == "nonzero":
        return torch.empty(0, arguments[0].dim(), dtype=torch.int64, device="meta")
    if place.type == "cpu" and any(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in arguments):
        if name == "copy_":
            return arguments[0].fill_(1)
        return torch.ones(arguments[0].shape, dtype=named.get("dtype") or arguments[0].dtype)
    return NotImplemented


def _common_place(name: str, tensors: list[torch.Tensor], asked: torch.device | None) -> torch.device:
    """Return the device of the result. Raises RuntimeError, like CUDA, for tensors of several devices."""
    if name in ("_to_copy", "copy_", "copy") or not tensors:
        return _seen_place(torch.device(asked)) if asked is not None else _place_of(tensors[0])
    if name in TAKES_CPU_INDICES:
        tensors = [tensors[0], *(x for x in tensors[1:] if x.device.type != "cpu")]
    places = {_place_of(x): None for x in tensors if x.dim() or x.device.type != "cpu"}
    if len(places) > 1:
        some = " and ".join(str(place) for place in places)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {some}! ({name})"
        )
    own = next(iter(places), torch.device("cpu"))
    return own if asked is None else _seen_place(torch.device(asked))


def _count(
    facts: _Facts, tensors: list[torch.Tensor], place: torch.device, is_blocking: bool, counts: Counter[str]
) -> None:
    """Count the operation as a kernel, a copy between devices or a wait for the device.

    A copy to the device, too, waits for all kernels before it (copy_kernel_cuda: cudaMemcpyAsync, then
    cudaStreamSynchronize), unless it is `non_blocking`. A copy to the CPU always does: its result is read at once.
    """
    name = facts.name
    if name in ("_to_copy", "copy_", "copy") or (name in TAKES_CPU_INDICES):
        sources = {_place_of(x) for x in tensors if x.dim() or name not in TAKES_CPU_INDICES} - {place}
        counts["copies"] += bool(sources)
        if place.type == "cpu":
            counts["synchronizations"] += 1
            return
        counts["synchronizations"] += is_blocking and any(source.type == "cpu" for source in sources)
    is_masked = name in TAKES_CPU_INDICES and any(x.dtype == torch.bool for x in tensors[1:])
    counts["synchronizations"] += name in SYNCHRONIZING or is_masked
    counts["launches"] += facts.is_launch


# --- CUDA's attention kernels, which refuse what CUDA refuses


def _is_flash(query: Any, key: Any, value: Any, bias: Any = None, *_: Any) -> bool:
    """Return whether CUDA's flash kernel takes these (sdp_utils.cpp: check_flash_attention_hardware_support, …)."""
    halves = (torch.float16, torch.bfloat16) if Device.capability >= (8, 0) else ()
    width = query.shape[-1]
    is_narrow = width == key.shape[-1] == value.shape[-1] <= 256 and width % 8 == 0
    return bias is None and query.dtype in halves and is_narrow and query.shape[1] % key.shape[1] == 0


def _is_efficient(query: Any, key: Any, value: Any, *_: Any) -> bool:
    """Return whether CUDA's memory-efficient kernel takes these (sdp_utils.cpp: check_head_dim_size_mem_efficient)."""
    aligned = {torch.float32: 4, torch.float16: 8} | ({torch.bfloat16: 8} if Device.capability >= (8, 0) else {})
    widths = [x.shape[-1] for x in (query, key, value)]
    is_aligned = query.dtype in aligned and all(width % aligned[query.dtype] == 0 for width in widths)
    return is_aligned and widths[0] == widths[1] and query.shape[1] == key.shape[1]


def _check_bias(query: Any, key: Any, bias: Any) -> None:
    """Raise RuntimeError for a bias that the memory-efficient kernel does not read (attention_forward.cu)."""
    if bias is None:
        return
    if bias.dtype != query.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")
    if bias.shape != (*query.shape[:3], key.shape[2]):
        raise RuntimeError(f"bias of shape {tuple(bias.shape)}")
    aligned = 4 if query.dtype == torch.float32 else 8
    if bias.stride(-1) != 1 or any(stride % aligned for stride in bias.stride()[:-1]):
        raise RuntimeError(f"attn_bias is not correctly aligned: its strides are {bias.stride()}")


def _flash(
    query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, *_: Any, **named: Any
) -> tuple:
    causal, scale = named.get("is_causal", causal), named.get("scale")
    if not _is_flash(query, key, value):
        raise RuntimeError(f"FlashAttention does not take {query.dtype} with a head width of {query.shape[-1]}")
    mix, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, is_causal=causal, scale=scale)
    empty = torch.zeros(0, dtype=torch.int64)
    return mix, lse, empty, empty, query.shape[2], key.shape[2], empty, empty, torch.zeros(0, dtype=query.dtype)


def _flash_backward(
    gradient: Any, query: Any, key: Any, value: Any, mix: Any, lse: Any, *arguments: Any, scale: Any = None
) -> tuple:
    causal = arguments[5]
    if not _is_flash(query, key, value):
        raise RuntimeError(f"FlashAttention does not take {query.dtype} with a head width of {query.shape[-1]}")
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, mix, lse, 0.0, causal, scale=scale
    )


def _efficient(query: Any, key: Any, value: Any, bias: Any, with_lse: bool, *arguments: Any, **named: Any) -> tuple:
    causal, scale = named.get("is_causal", arguments[1] if len(arguments) > 1 else False), named.get("scale")
    if not _is_efficient(query, key, value):
        raise RuntimeError(f"cutlassF: no kernel found to launch! ({query.dtype}, width {query.shape[-1]})")
    _check_bias(query, key, bias)
    mix, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=causal, attn_mask=bias, scale=scale
    )
    padding = (0, -query.shape[2] % 32)
    empty = torch.zeros(0, dtype=torch.int64)
    return mix, torch.nn.functional.pad(lse, padding, value=torch.inf), empty, empty


def _efficient_backward(
    gradient: Any, query: Any, key: Any, value: Any, bias: Any, mix: Any, lse: Any, *arguments: Any, scale: Any = None
) -> tuple:
    causal = arguments[4] if len(arguments) > 4 else False
    _check_bias(query, key, bias)
    if lse.shape[-1] % 32 or not (lse.is_meta or lse[..., query.shape[2] :].eq(torch.inf).all()):
        raise RuntimeError("the log-sum-exp is not padded as the forward pass pads it")
    lse = lse[..., : query.shape[2]].contiguous()
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, mix, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    return *gradients, torch.zeros(0)


def _to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 10 bits of TF32's mantissa."""
    return ((x.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def _histogram(x: Any, *arguments: Any, **named: Any) -> Any:
    """Count whole numbers, too, as CUDA does."""
    return aten.histc(x.float(), *arguments, **named).to(x.dtype)


def _product(left: Any, right: Any, out_dtype: torch.dtype | None = None) -> Any:
    """Multiply half precision with a result in float32, which PyTorch does on CUDA only."""
    return aten.bmm(left.to(out_dtype or left.dtype), right.to(out_dtype or right.dtype))


KERNELS = {
    "bmm": _product,
    "histc": _histogram,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}


# --- installed once for the process; `simulated` makes the devices available

_setup_privateuseone_for_python_backend(NAME, _Module(), _Hook())
_LIBRARY = torch.library.Library("_", "IMPL")
for _key in ("PrivateUse1", "Lazy"):
    _LIBRARY.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), _key)
# `torch.tensor(…, device=…)` and a list as index copy while the dispatch of Python is off
_OF_ATEN = torch.library.Library("aten", "IMPL")
# … and what C++ would resize after it was made, which a wrapper cannot follow
_RESIZED = ("arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "randperm", "randperm.generator")
for _name in ("copy_", *_RESIZED):
    _own = getattr(getattr(aten, _name.partition(".")[0]), _name.partition(".")[2] or "default")
    for _key in ("PrivateUse1", "Lazy"):
        _OF_ATEN.impl(_name, lambda *arguments, _own=_own, **named: _run(_own, arguments, named), _key)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count launches, synchronizations and copies until the end of the block."""
    before, Device.counts = Device.counts, Counter()
    try:
        yield Device.counts
    finally:
        Device.counts = before


class _Generator(torch.Generator):
    """A generator of any device: numbers are drawn on the CPU."""

    def __new__(cls: type, device: Any = "cpu") -> "_Generator":
        generator: _Generator = super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)
        return generator


@contextmanager
def simulated(capability: tuple[int, int] = (8, 0)) -> Iterator[None]:
    """Make the simulated devices available, as GPUs of this compute capability, until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "is_available", True)
        patch.setattr(Device, "capability", capability)
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(packed, "ORDINARY_TYPES", (*packed.ORDINARY_TYPES, Simulated))
        patch.setattr(torch.backends.cuda, "SDPAParams", lambda *arguments: arguments)
        patch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda arguments: _is_flash(*arguments))
        patch.setattr(torch.backends.cuda, "can_use_efficient_attention", lambda arguments: _is_efficient(*arguments))
        patch.setitem(kernels.FUSED, NAME, kernels.FUSED["cuda"])
        patch.setattr(kernels, "HALF_PRODUCTS", {NAME})
        yield


def moved(model: PreTrainedModel, places: int = 1) -> PreTrainedModel:
    """Move a model to one simulated device, or spread it over two as `device_map="auto"` does."""
    if places == 1:
        model.to(f"{NAME}:0")
        model.tie_weights()
        return model
    layers, where = find_family(model).layers, {}
    last = model.config.num_hidden_layers - 1
    for name, module in model.named_modules():
        path, _, at = name.rpartition(".")
        if path == layers:  # the last layer lies on the second device
            where[name] = f"{NAME}:{int(int(at) == last)}"
        elif not f"{name}.".startswith(f"{layers}.") and (module._parameters or module._buffers):
            # what follows the layers, too, but not an output that shares its weight with the embeddings
            follows = any(key.startswith(layers) for key in where)
            is_tied = getattr(module, "weight", None) is model.get_input_embeddings().weight
            where[name] = f"{NAME}:{int(follows and not is_tied)}"
    return dispatch_model(model, where, main_device=f"{NAME}:0")
