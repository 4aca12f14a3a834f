"""Attention operations other than softmax (WSE §7.4, tables 6 and 14), for training models from scratch.

`elu-kernel` and `mlp-kernel` are similarities of features, φ(q)·φ(k)/√d, with φ = elu + 1 or a small learned network of
each head. The feature maps act before the taps, so the measured queries and keys are features. The paper's p-norm and
scaled sums are `softmax` with `power` and `factor`. `softpick` is relu(e^l − 1) ÷ (Σ|e^l − 1| + ε) of Zuhri et al. 2025
(arXiv:2504.20966): a token whose logits are all negative attends to nothing.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from transformers import PreTrainedModel

from sinkscope.attention.kernels import Operation
from sinkscope.attention.taps import NAME, OtherOperation
from sinkscope.errors import unknown
from sinkscope.models.family import ON_LOGITS, Family, text_tower
from sinkscope.retrofits.retrofit import Layer, Part, Retrofit

# name → the feature map, and the operation on products of features
OPERATION_KINDS: dict[str, tuple[str, Operation]] = {
    "softmax": ("", Operation("exp", "sum")),
    "sigmoid": ("", Operation("sigmoid", "none")),
    "sigmoid-normalized": ("", Operation("sigmoid", "sum")),
    "elu": ("", Operation("elu", "none")),
    "elu-kernel": ("elu", Operation("identity", "sum")),
    "elu-kernel-unnormalized": ("elu", Operation("identity", "none")),
    "identity": ("", Operation("identity", "none")),
    "identity-normalized": ("", Operation("identity", "at-least-1")),
    "mlp-kernel": ("mlp", Operation("identity", "none")),
    "mlp-kernel-normalized": ("mlp", Operation("identity", "at-least-1")),
    "softpick": ("", Operation("rectified", "sizes")),
}

SCALED_SOFTMAX = "scaled softmax"  # softmax scaled by α
# operations with weights of a fixed sum, regardless of the number of tokens that a query sees
SUM_TO_ONE = {SCALED_SOFTMAX, *(kind for kind, (_, operation) in OPERATION_KINDS.items() if operation.divisor == "sum")}


class AttendBy(Part, OtherOperation):
    """The operation of one attention layer; an MLP kernel has `weights` (2,K,d,d), two matrices for each key head.

    The paper does not define its networks. Here they are d → d → d with GELU between, and preserve the size of their
    input: the weights start at N(0, 1/d).
    """

    head_axis = 1

    def __init__(self, layer: Layer, method: "AttentionOperation") -> None:
        super().__init__()
        self.map, operation = OPERATION_KINDS[method.kind]
        self.operation = replace(operation, factor=method.factor, power=method.power)
        is_scaled = method.kind == "softmax" and method.factor != 1.0
        self.called = "p-norm softmax" if method.power != 1.0 else SCALED_SOFTMAX if is_scaled else method.kind
        if self.map == "mlp":
            self.weights = layer.empty(2, layer.value_heads, layer.head_dim, layer.head_dim)
            self.draw_start(layer, layer.head_dim**-0.5)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        if self.map == "elu":
            return F.elu(x) + 1
        if self.map == "mlp":
            # the query heads of a group share the network of their key head
            grouped = x.unflatten(1, (self.weights.shape[1], -1))
            inner, outer = self.weights[:, :, None].to(x.dtype)
            return (F.gelu(grouped @ inner) @ outer).flatten(1, 2)
        return x

    def attach(self, layer: Layer, model: PreTrainedModel, family: Family) -> None:
        text_tower(model)[1].set_attn_implementation(NAME)


class AttentionOperation(Retrofit):
    name = "operation"
    about = (
        f"another attention operation, for training from scratch (kind: {', '.join(OPERATION_KINDS)}; "
        "factor: α of Z/α; of softmax power: p of Z = (Σ simᵖ)^(1/p))"
    )
    paper = "WSE §7.4"
    part = AttendBy

    kind: str = "sigmoid"
    factor: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    power: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        if kind not in OPERATION_KINDS:
            raise ValueError(unknown(kind, OPERATION_KINDS))
        return kind

    @model_validator(mode="after")
    def _check_softmax(self) -> "AttentionOperation":
        if self.kind != "softmax" and self.power != 1.0:
            raise ValueError(f"power belongs to kind=softmax, not to {self.kind}")
        return self

    def inapplicable(self, model: PreTrainedModel, family: Family) -> str | None:
        if family.door != "interface":
            return "its own code computes softmax: it does not call transformers' attention interface"
        if any(hasattr(attention, "sinks") for attention in family.attentions(model).values()):
            return "it has learnable sinks of its own, which are part of a softmax"
        if OPERATION_KINDS[self.kind][1].similarity == "identity" and family.kinds_of_positions & ON_LOGITS:
            return f"its positions are a bias on the logits, and {self.kind} is a product of features alone"
        return super().inapplicable(model, family)
