"""A model's products with its weight matrices, and a simulation of kernels that read quantized factors.

A product is changed where it is computed: torch's linear, matmul or addmm with a parameter, or with one expert's slice
of a parameter. So only one matrix at a time exists a second time, and weights that accelerate keeps elsewhere are there
when they are read.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.edits import check_own_map, check_parameters, wrapped_forward
from sinkscope.models.family import Family
from sinkscope.models.in_memory import own_configurations
from sinkscope.models.projections import layer_and_kind, linear_modules

MATMULS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm}
INPUT_PLACE = {F.linear: 0, torch.addmm: 1, **dict.fromkeys(MATMULS, 0)}  # of a product's arguments; the weight follows


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of a module, or one expert's."""

    path: str  # of the module that multiplies by it
    layer: int
    kind: str  # the path within a layer; experts are one kind
    parameter: str = "weight"
    expert: int | None = None

    @property
    def parameter_path(self) -> str:
        return f"{self.path}.{self.parameter}"

    @property
    def module(self) -> str:
        """The name of a module that could be spared, which an expert's matrices are, too, where models are served."""
        return self.path if self.expert is None else f"{self.path}.{self.expert}.{self.parameter}"


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # input (…,D) and weight (out,D) → output (…,out)
# (matrix, its product, input, weight, the rows of the module's input that an expert reads) → output
ProductChange = Callable[[Matrix, Product, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def matrices_of(model: PreTrainedModel, family: Family) -> list[Matrix]:
    """Return the matrices of all linear modules except the LM head, and of experts that are one tensor per layer.

    Raises:
        InputError: A module's output is not the product with its weight.
    """
    matrices = []
    for path, module in linear_modules(model):
        check_weight(path, module)
        matrices.append(Matrix(path, *layer_and_kind(path, family)))
    for path, module in model.named_modules():
        for name, parameter in _expert_parameters(module):
            layer, kind = layer_and_kind(f"{path}.{name}", family)
            matrices += [Matrix(path, layer, kind, name, expert) for expert in range(len(parameter))]
    return matrices


def check_weight(path: str, module: nn.Module) -> None:
    """Raise InputError unless a module's output is the product with its weight, which is a parameter."""
    try:
        check_own_map(module)
        check_parameters(module)
    except InputError as error:
        raise InputError(f"{path} cannot be quantized: {error}") from None


def _expert_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the stacked matrices (experts, …, …) of a module whose forward transformers dispatches."""
    parameters = module.named_parameters(recurse=False) if hasattr(module, "_apply_gate") else ()
    return [(name, parameter) for name, parameter in parameters if parameter.dim() == 3]


class _Products(TorchFunctionMode):
    """Changes the products with the matrices of one module while its forward runs."""

    def __init__(self, module: nn.Module, matrices: Mapping[tuple[str, int | None], Matrix], change: ProductChange):
        super().__init__()
        self.module, self.matrices, self.change = module, matrices, change
        self.rows: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.long:
            if args[1].dim() == 1:  # an expert selects its tokens
                self.rows = args[1]
            return func(*args, **kwargs or {})
        place = INPUT_PLACE.get(func)
        matrix = None if place is None else self._matrix_of(args[place + 1])
        if place is None or matrix is None:
            return func(*args, **kwargs or {})
        is_by_input = func is not F.linear  # the weight is (D,out)

        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return func(*args[:place], x, weight.mT if is_by_input else weight, *args[place + 2 :], **kwargs or {})

        x, weight = args[place : place + 2]
        rows = None if matrix.expert is None else self.rows
        return self.change(matrix, product, x, weight.mT if is_by_input else weight, rows)

    def _matrix_of(self, weight: Any) -> Matrix | None:
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            return None
        for name, parameter in self.module.named_parameters(recurse=False):  # accelerate may have just loaded them
            if weight is not parameter and weight._base is not parameter:
                continue
            if parameter.dim() == 2 and weight.numel() == parameter.numel():  # as it is, or transposed
                return self.matrices.get((name, None))
            if parameter.dim() == 3:
                number = (weight.storage_offset() - parameter.storage_offset()) // parameter.stride(0)
                return self.matrices.get((name, number))
        return None


@contextmanager
def changed_products(model: PreTrainedModel, matrices: Collection[Matrix], change: ProductChange) -> Iterator[None]:
    """Replace the products with these matrices until the end of the block."""
    by_module: dict[str, dict[tuple[str, int | None], Matrix]] = {}
    for matrix in matrices:
        by_module.setdefault(matrix.path, {})[matrix.parameter, matrix.expert] = matrix

    def around(module: nn.Module, mine: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with _Products(module, mine, change):
            return forward(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(own_configurations(model))
        for path, mine in by_module.items():
            module = model.get_submodule(path)
            if any(expert is not None for _, expert in mine):
                module.config._experts_implementation = "eager"  # type: ignore[union-attr]  # one expert at a time
            stack.enter_context(wrapped_forward(module, partial(around, module, mine)))
        yield


@contextmanager
def all_experts_read(model: PreTrainedModel, matrices: Iterable[Matrix]) -> Iterator[None]:
    """Let each expert read all tokens before those that it is given, and use these outputs alone.

    llm-compressor calibrates so: a range does not depend on the experts to which a few texts happen to be given.
    """

    def around(experts: int, forward: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        every = torch.arange(experts, device=chosen.device).expand(len(x), -1)
        forward(x, every, weights.new_ones(every.shape))
        return forward(x, chosen, weights)

    experts = {matrix.path: matrix.expert + 1 for matrix in matrices if matrix.expert is not None}  # the last one's
    with ExitStack() as stack:
        for path, count in experts.items():
            stack.enter_context(wrapped_forward(model.get_submodule(path), partial(around, count)))
        yield
