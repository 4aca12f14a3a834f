"""The sites at which a model is quantized in the papers' schemes, by scheme.

static   input, weight and output of every linear layer except the LM head
full     also weights and outputs of the embeddings, their sum, every residual sum, the attention scores before the mask
         and the softmax's output (Bondarenko et al. 2023 quantize the gains of norms too, and for two fused layers only
         the output of the second)

Both may include the keys and values, after the positional encoding, as attention reads them and a cache holds them.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sinkscope.errors import InputError, unknown
from sinkscope.models.adapters import check_no_adapter
from sinkscope.models.family import NOT_RUN, Family, read_a_token
from sinkscope.models.packed import check_not_packed
from sinkscope.models.projections import NO_LAYER, layer_and_kind, linear_modules
from sinkscope.quantization.formats import FULL_SCHEME, STATIC_SCHEME, STATIC_SCHEMES
from sinkscope.quantization.products import check_weight

INPUT, WEIGHT, OUTPUT = "input", "weight", "output"
PARTS = (INPUT, WEIGHT, OUTPUT)
SUM = "residual sum"
SCORES, SOFTMAX, KEYS, VALUES = "scores", "softmax output", "keys", "values"  # parts of an attention layer
CACHED = (KEYS, VALUES)
IN_ATTENTION = (SCORES, SOFTMAX, *CACHED)


@dataclass(frozen=True)
class Site:
    """One tensor that is quantized."""

    path: str  # path of the module in the model; for a residual sum its address, which ends in .input or .output
    part: str
    layer: int
    kind: str  # the path within a layer, such as mlp.down_proj; experts that are separate modules are one kind

    @property
    def role(self) -> str:
        return f"{self.kind} {self.part}"

    def __str__(self) -> str:
        return self.role if self.layer == NO_LAYER else f"layer {self.layer} {self.role}"

    @property
    def names(self) -> set[str]:
        """The names by which a user may refer to the site; a name may match several sites."""
        return {self.kind, self.role, self.path, f"{self.path} {self.part}", str(self)}


def sites_of(
    model: PreTrainedModel, family: Family, scheme: str = STATIC_SCHEME, has_cache: bool = False
) -> list[Site]:
    """Return the sites of a model: linear layers, then the sites that only scheme `full` has, then keys and values."""
    if scheme not in STATIC_SCHEMES:
        raise InputError(f"scheme {unknown(scheme, STATIC_SCHEMES)}")
    check_not_packed(model, "simulated quantization")
    check_no_adapter(model, "simulated quantization")
    # modules that the text passes: the modules of running layers, and the modules outside layers that run
    linear = {path: (module, *layer_and_kind(path, family)) for path, module in linear_modules(model)}
    running = {
        layer: block
        for layer, block in enumerate(map(family.block, range(len(family.layer_modules(model)))))
        if block.kind != NOT_RUN
    }
    is_passed = all(layer in running for _, layer, _ in linear.values())
    reached = set() if is_passed and scheme != FULL_SCHEME else read_a_token(model)[0]
    sites = []
    for path, (module, layer, kind) in linear.items():
        if layer in running or path in reached:
            _check_in_memory(path, module)
            sites += [Site(path, part, layer, kind) for part in PARTS]
    if not sites:
        raise InputError("this model has no linear layers that could be quantized")
    if scheme == FULL_SCHEME:
        _check_interface(family, "--scheme full", "scores and softmax outputs")
        for path, module in model.named_modules():
            if isinstance(module, nn.Embedding) and path in reached and layer_and_kind(path, family)[0] == NO_LAYER:
                _check_in_memory(path, module)
                sites += [Site(path, part, NO_LAYER, path) for part in (WEIGHT, OUTPUT)]
        first = next(iter(running))
        sites.append(Site(f"{family.layers}.{first}.input", SUM, first, "layer_in"))
        for layer, block in running.items():
            within, name = f"{family.layers}.{layer}", block.attention
            sites += [Site(f"{within}.{name}", part, layer, name) for part in (SCORES, SOFTMAX) if name]
            sums = [site for site in ("mid", "layer_out") if site in block.sites]
            sites += [Site(f"{within}.{block.sites[site]}", SUM, layer, site) for site in sums]
    if has_cache:
        _check_interface(family, "--kv-cache-per", "keys and values")
        for layer, block in running.items():
            name = block.attention
            sites += [Site(f"{family.layers}.{layer}.{name}", part, layer, name) for part in CACHED if name]
    return sites


def _check_interface(family: Family, option: str, what: str) -> None:
    if family.door != "interface":
        raise InputError(
            f"{option} does not apply to {family.name}, because its attention code is its own: its {what} cannot be "
            "quantized"
        )


def linear_modules_without(model: PreTrainedModel, quantized: Collection[str]) -> list[str] | None:
    """Return the nn.Linear modules that are not quantized, such as the LM head; None if a quantized one is another."""
    if not all(isinstance(model.get_submodule(path), nn.Linear) for path in quantized):
        return None
    return [path for path, module in model.named_modules() if isinstance(module, nn.Linear) and path not in quantized]


def not_quantized(model: PreTrainedModel, family: Family, quantized: Collection[str] | None = None) -> dict[str, float]:
    """Map matrices in layers that are not quantized to their share of the model's parameters, such as routers.

    `quantized` are the paths of those that are; None: the weights of all linear modules.
    """
    covered = {f"{path}.weight" for path, _ in linear_modules(model)} if quantized is None else quantized
    total = sum(parameter.numel() for parameter in model.parameters())
    shares: dict[str, float] = {}
    for path, parameter in model.named_parameters():
        layer, kind = layer_and_kind(path, family)
        if layer != NO_LAYER and parameter.dim() > 1 and path not in covered and not path.endswith("bias"):
            shares[kind] = shares.get(kind, 0.0) + parameter.numel() / total
    return shares


def chosen_sites(sites: Collection[Site], named: Iterable[Site | str]) -> set[Site]:
    """Return the sites that the user names. Raises InputError if a name matches no site.

    A name is a kind (mlp.down_proj), a kind's part (mlp.down_proj input), a module's path with or without the part, or
    one site as it is printed (layer 11 mlp.down_proj input).
    """
    chosen: set[Site] = set()
    for name in [named] if isinstance(named, str) else named:
        meant = {site for site in sites if name == site or name in site.names}
        if not meant:
            known = {known for site in sites for known in (site.kind, site.role)}
            raise InputError(f"site {unknown(str(name), sorted(known))}")
        chosen |= meant
    return chosen


def _check_in_memory(path: str, module: Any) -> None:
    if module.weight.is_meta:
        raise InputError(f"{path}: its weights are offloaded and cannot be edited: load without --device-map auto")
    check_weight(path, module)
