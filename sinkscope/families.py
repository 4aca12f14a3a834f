"""Where each architecture keeps its layers and sites. Adding a family = adding one row to `FAMILIES`.

A site is written as `module.path.input` or `module.path.output`, relative to one layer; the bare words `input` and
`output` are the layer's own. Where a module returns a tuple its first tensor is meant. Every row was found by
checking the wiring equation numerically (`check_wiring`), and the tests do so again for every row:

    sequential   mid = layer_in + attn_out     layer_out = mid + mlp_out
    parallel     (no mid)                      layer_out = layer_in + attn_out + mlp_out
    post-norm    mid = layer_in + attn_out     layer_out = norm(norm(mid) + mlp_out)

Sandwich-norm families (Gemma 2/3, OLMo 2) are sequential here: what is added to the residual stream is the
output of the norm behind the branch.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from sinkscope.errors import InputError
from sinkscope.model_types import base_type

# In the order in which a forward pass reaches them (sites of definitions §1; attention's own sites are in seam.py).
RESIDUAL_SITES = (
    "layer_in",
    "attn_norm",
    "attn_out",
    "mid",
    "mlp_norm",
    "mlp_out",
    "layer_out",
)


@dataclass(frozen=True)
class Family:
    """One row: an architecture as sinkscope sees it."""

    name: str
    layers: str  # path of the ModuleList of blocks
    attention: str  # path of the attention module, relative to a layer
    sites: Mapping[str, str]  # site → address, relative to a layer, in the order in which a forward pass reaches them
    wiring: str = "sequential"  # or "parallel", "post-norm"
    positions: str = "rotary"  # or "learned", "alibi"
    door: str = "interface"  # how the seam gets in: transformers' AttentionInterface, or the interceptor
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # projections in the attention module: three, or one for all
    fused: str = (
        ""  # how one holds all: "blocks" (all of q, of k, of v) or "groups" (a key head with its queries, value)
    )
    output: str = "o_proj"  # the projection in the attention module that reads every head's mix, heads in order
    mlp: tuple[str, ...] = ("mlp",)  # the feed-forward network: modules that run in a row, relative to a layer
    position_embedding: str = ""  # path of the learned positions' embedding
    position_offset: int = 0  # its row of position 0
    scaling: float | None = None  # of q·k; None: 1/√d
    when: Mapping[str, Any] = field(default_factory=dict)  # config attributes that this row's wiring requires

    def layer_modules(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule(self.layers).children())

    def absent_sites(self) -> dict[str, str]:
        """Residual-stream sites that this family does not have, with the reason."""
        reasons = {
            "mid": "attention and MLP read the same input (parallel residual), so h+½ does not exist",
            "attn_norm": "attention reads the residual stream without a norm in front",
            "mlp_norm": "the MLP reads its input without a norm of its own in front",
        }
        return {site: reasons[site] for site in RESIDUAL_SITES if site not in self.sites}


def _sites(**addresses: str) -> dict[str, str]:
    everywhere = {"layer_in": "input", "layer_out": "output"}
    return {site: (everywhere | addresses)[site] for site in RESIDUAL_SITES if site in everywhere | addresses}


_LLAMA = Family(
    name="llama",
    layers="model.layers",
    attention="self_attn",
    sites=_sites(
        attn_norm="input_layernorm.output",
        attn_out="self_attn.output",
        mid="post_attention_layernorm.input",
        mlp_norm="post_attention_layernorm.output",
        mlp_out="mlp.output",
    ),
)
_GEMMA = replace(
    _LLAMA,
    sites=_sites(
        attn_norm="input_layernorm.output",
        attn_out="post_attention_layernorm.output",
        mid="pre_feedforward_layernorm.input",
        mlp_norm="pre_feedforward_layernorm.output",
        mlp_out="post_feedforward_layernorm.output",
    ),
)
# Attention and MLP share one norm.
_ONE_NORM_PARALLEL = replace(
    _LLAMA,
    wiring="parallel",
    sites=_sites(attn_norm="input_layernorm.output", attn_out="self_attn.output", mlp_out="mlp.output"),
)
_GPT2 = Family(
    name="gpt2",
    layers="transformer.h",
    attention="attn",
    positions="learned",
    qkv=("c_attn",),
    fused="blocks",
    position_embedding="transformer.wpe",
    output="c_proj",
    sites=_sites(
        attn_norm="ln_1.output",
        attn_out="attn.output",
        mid="ln_2.input",
        mlp_norm="ln_2.output",
        mlp_out="mlp.output",
    ),
)
_GPT_NEOX = Family(
    name="gpt_neox",
    layers="gpt_neox.layers",
    attention="attention",
    qkv=("query_key_value",),
    fused="groups",
    output="dense",
    sites=_sites(
        attn_norm="input_layernorm.output",
        attn_out="attention.output",
        mid="post_attention_layernorm.input",
        mlp_norm="post_attention_layernorm.output",
        mlp_out="mlp.output",
    ),
)
_OPT = Family(
    name="opt",
    layers="model.decoder.layers",
    attention="self_attn",
    positions="learned",
    mlp=("fc1", "activation_fn", "fc2"),
    position_embedding="model.decoder.embed_positions",
    position_offset=2,
    output="out_proj",
    sites=_sites(
        attn_norm="self_attn_layer_norm.output",
        attn_out="self_attn.output",
        mid="final_layer_norm.input",
        mlp_norm="final_layer_norm.output",
        mlp_out="fc2.output",
    ),
)
_BLOOM = Family(
    name="bloom",
    layers="transformer.h",
    attention="self_attention",
    qkv=("query_key_value",),
    fused="groups",
    positions="alibi",
    door="interceptor",
    output="dense",
    sites=_sites(
        attn_norm="input_layernorm.output",
        # the attention module and the MLP add the residual themselves: read their last projections
        attn_out="self_attention.dense.output",
        mid="post_attention_layernorm.input",
        mlp_norm="post_attention_layernorm.output",
        mlp_out="mlp.dense_4h_to_h.output",
    ),
)
_FALCON = Family(
    name="falcon",
    layers="transformer.h",
    attention="self_attention",
    qkv=("query_key_value",),
    fused="groups",
    wiring="parallel",
    door="interceptor",
    output="dense",
    # mlp_out is read before the block adds attn_out into that very tensor
    sites=_sites(attn_norm="input_layernorm.output", attn_out="self_attention.output", mlp_out="mlp.output"),
)
_MPT = Family(
    name="mpt",
    layers="transformer.blocks",
    attention="attn",
    qkv=("Wqkv",),
    fused="blocks",
    mlp=("ffn",),
    positions="alibi",
    door="interceptor",
    output="out_proj",
    sites=_sites(
        attn_norm="norm_1.output",
        attn_out="resid_attn_dropout.output",
        mid="norm_2.input",
        mlp_norm="norm_2.output",
        mlp_out="ffn.down_proj.output",  # the MLP adds the residual itself
    ),
)

# model type (config.json) → its rows; the first whose `when` holds is the model's.
FAMILIES: dict[str, tuple[Family, ...]] = {
    "llama": (_LLAMA,),
    "mistral": (replace(_LLAMA, name="mistral"),),
    "mixtral": (replace(_LLAMA, name="mixtral"),),
    "qwen2": (replace(_LLAMA, name="qwen2"),),
    "qwen3": (replace(_LLAMA, name="qwen3"),),
    "qwen3_moe": (replace(_LLAMA, name="qwen3_moe"),),
    "gemma2": (replace(_GEMMA, name="gemma2"),),
    "gemma3_text": (replace(_GEMMA, name="gemma3"),),
    "gemma3": (replace(_GEMMA, name="gemma3", layers="model.language_model.layers"),),
    "olmo2": (
        replace(
            _LLAMA,
            name="olmo2",
            sites=_sites(
                attn_out="post_attention_layernorm.output",
                mid="mlp.input",
                mlp_out="post_feedforward_layernorm.output",
            ),
        ),
    ),
    "phi": (replace(_ONE_NORM_PARALLEL, name="phi", output="dense"),),
    "phi3": (replace(_LLAMA, name="phi3", qkv=("qkv_proj",), fused="blocks"),),
    "stablelm": (
        replace(_LLAMA, name="stablelm", when={"use_parallel_residual": False}),
        replace(_ONE_NORM_PARALLEL, name="stablelm", when={"use_parallel_residual": True}),
    ),
    "cohere": (replace(_ONE_NORM_PARALLEL, name="cohere"),),
    "gpt_oss": (replace(_LLAMA, name="gpt_oss"),),
    "gpt2": (_GPT2,),
    "gpt_neox": (
        replace(
            _GPT_NEOX,
            wiring="parallel",
            when={"use_parallel_residual": True},
            sites={site: address for site, address in _GPT_NEOX.sites.items() if site != "mid"},
        ),
        replace(_GPT_NEOX, when={"use_parallel_residual": False}),
    ),
    "opt": (
        replace(_OPT, when={"do_layer_norm_before": True}),
        replace(  # OPT-350M
            _OPT,
            wiring="post-norm",
            when={"do_layer_norm_before": False},
            sites=_sites(attn_out="self_attn.output", mid="self_attn_layer_norm.input", mlp_out="fc2.output"),
        ),
    ),
    "bloom": (replace(_BLOOM, when={"apply_residual_connection_post_layernorm": False}),),
    "falcon": (
        replace(
            _FALCON,
            when={"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2},
            sites={  # both norms run before attention does
                "layer_in": "input",
                "attn_norm": "ln_attn.output",
                "mlp_norm": "ln_mlp.output",
                "attn_out": "self_attention.output",
                "mlp_out": "mlp.output",
                "layer_out": "output",
            },
        ),
        replace(_FALCON, when={"parallel_attn": True}),
        replace(
            _FALCON,
            wiring="sequential",
            when={"parallel_attn": False, "new_decoder_architecture": False},
            sites=_sites(
                attn_norm="input_layernorm.output",
                attn_out="self_attention.output",
                mid="post_attention_layernorm.input",
                mlp_norm="post_attention_layernorm.output",
                mlp_out="mlp.output",
            ),
        ),
    ),
    "mpt": (_MPT,),
    "gptj": (
        replace(
            _GPT2,
            name="gptj",
            wiring="parallel",
            positions="rotary",
            door="interceptor",
            qkv=_LLAMA.qkv,
            fused="",
            output="out_proj",
            position_embedding="",
            sites=_sites(attn_norm="ln_1.output", attn_out="attn.output", mlp_out="mlp.output"),
        ),
    ),
    "gpt_neo": (
        replace(
            _GPT2,
            name="gpt_neo",
            attention="attn.attention",
            door="interceptor",
            qkv=_LLAMA.qkv,
            fused="",
            output="out_proj",
            scaling=1.0,
        ),
    ),
}


def find_family(model: nn.Module) -> Family:
    """The row of FAMILIES for a loaded model.

    Errors: InputError when the model type has no row, or none whose `when` holds for this configuration.
    """
    config: Any = model.config
    model_type = base_type(config.model_type)
    rows = FAMILIES.get(model_type, ())
    for row in rows:
        if all(getattr(config, name, None) == value for name, value in row.when.items()):
            return replace(row, positions="alibi") if getattr(config, "alibi", False) else row
    if rows:
        wanted = " or ".join(str(dict(row.when)) for row in rows)
        raise InputError(f"no row for a {model_type} wired like this one (there is one for {wanted})")
    raise InputError(
        f"the architecture '{model_type}' has no row in sinkscope/families.py "
        f"(`sinkscope list families` shows those that have one)"
    )


def embedding_weight(model: Any) -> torch.Tensor:
    """The token embeddings (V,D): how large the vocabulary is, and where inputs go."""
    return model.get_input_embeddings().weight


def first_tensor(value: Any) -> torch.Tensor:
    """A module's own result where it returns a tuple."""
    return value[0] if isinstance(value, tuple) else value


@contextmanager
def _recorded(layer: nn.Module, record: dict[str, torch.Tensor], wanted: set[str]) -> Iterator[None]:
    """Copies of the wanted tensors of one layer in plain transformers, without nnsight: the doctor's second opinion."""

    def before(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        address = f"{path}.input".lstrip(".")
        if address in wanted:
            record[address] = (args[0] if args else next(iter(kwargs.values()))).detach().clone()

    def after(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        address = f"{path}.output".lstrip(".")
        if address in wanted and isinstance(first_tensor(output), torch.Tensor):
            record[address] = first_tensor(output).detach().clone()

    handles = []
    for path, module in layer.named_modules():
        handles.append(module.register_forward_pre_hook(partial(before, path), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(after, path)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def read_sites(model: nn.Module, family: Family, token_ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Every site of every layer, (B,T,D), read with ordinary forward hooks. Small inputs only: all is kept."""
    layers = family.layer_modules(model)
    records: list[dict[str, torch.Tensor]] = [{} for _ in layers]
    with ExitStack() as hooks:
        for layer, record in zip(layers, records, strict=True):
            hooks.enter_context(_recorded(layer, record, {"input", *family.sites.values()}))
        model(token_ids)
    return [
        {site: record[address].view(record["input"].shape) for site, address in family.sites.items()}
        for record in records
    ]


def check_wiring(family: Family, sites: dict[str, torch.Tensor]) -> float:
    """How far one layer is from its wiring equation (head of this file): largest error ÷ largest entry."""
    stream = sites["layer_in"].double() + sites["attn_out"].double()
    expected = [(stream, sites["mid"])] if "mid" in sites else []
    if family.wiring != "post-norm":
        expected.append((stream + sites["mlp_out"].double(), sites["layer_out"]))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in expected)


def calibrate(model: nn.Module, token_ids: torch.Tensor) -> Family:
    """A row for an architecture that has none, found by trying every row's wiring and keeping one that is exact.

    The layers are the ModuleList with one entry a layer; the sites are those of the first known row whose modules
    exist there and whose wiring equation holds at every layer to round-off.

    Errors: InputError naming what could not be found, so that the missing row can be written by hand.
    """
    config: Any = model.config
    text_config = config.get_text_config()
    stacks = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == text_config.num_hidden_layers
    ]
    if not stacks:
        raise InputError(f"'{config.model_type}': no ModuleList with {text_config.num_hidden_layers} layers found")
    layer = next(model.get_submodule(stacks[0]).children())
    tolerance = 100 * torch.finfo(next(model.parameters()).dtype).eps
    for row in _different_rows():
        # GPT-2's and GPT-Neo's blocks are one but for where attention is
        attention = next((path for path in (row.attention, *_ATTENTIONS) if _has(layer, path)), None)
        if attention is None or not all(_has(layer, address) for address in row.sites.values()):
            continue
        candidate = replace(
            row,
            name=config.model_type,
            layers=stacks[0],
            attention=attention,
            when={},
            door=_door(model),
            **_learned_positions(model, text_config),
            **_projections(layer.get_submodule(attention)),
        )
        try:
            records = read_sites(model, candidate, token_ids)
        except (KeyError, RuntimeError):  # a module never ran, or is not as wide as the residual stream
            continue
        if max(check_wiring(candidate, sites) for sites in records) < tolerance:
            return candidate
    raise InputError(
        f"'{config.model_type}' needs a row in sinkscope/families.py: its layers are at '{stacks[0]}', "
        f"but no known wiring gives its residual stream to round-off"
    )


def _different_rows() -> list[Family]:
    """Richest rows first: a sequential block also satisfies the parallel equation, which says less."""
    different = {
        (row.attention, row.wiring, tuple(row.sites.items())): row for rows in FAMILIES.values() for row in rows
    }
    return sorted(different.values(), key=lambda row: -len(row.sites))


def _projections(attention: nn.Module) -> dict[str, Any]:
    """Fields of a row. How one projection holds all three cannot be seen from outside: then they stay unknown."""
    known = ("q_proj", "k_proj", "v_proj")
    output = next((name for name in ("o_proj", "out_proj", "c_proj", "dense") if _has(attention, name)), "")
    return {"qkv": known if all(_has(attention, name) for name in known) else (), "fused": "", "output": output}


def _learned_positions(model: nn.Module, config: Any) -> dict[str, Any]:
    """Fields of a row: where positions are learned if a known row's embedding is there."""
    for row in _different_rows():
        if row.position_embedding and _has(model, row.position_embedding):
            where = {"position_embedding": row.position_embedding, "position_offset": row.position_offset}
            return {"positions": "learned"} | where
    return {"positions": _positions(config), "position_embedding": "", "position_offset": 0}


_ATTENTIONS = ("attn.attention", "self_attn", "self_attention", "attention", "attn")


def _has(layer: nn.Module, address: str) -> bool:
    """A module path, or one with .input or .output behind it."""
    path = address.removesuffix("input").removesuffix("output").rstrip(".")
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True


def _door(model: Any) -> str:
    """What transformers itself goes by when it is asked to change the attention implementation."""
    able = getattr(model, "_can_set_attn_implementation", None)
    return "interface" if able is not None and able() else "interceptor"


def _positions(config: Any) -> str:
    if getattr(config, "alibi", False):
        return "alibi"
    return "rotary" if getattr(config, "rope_parameters", None) else "unknown"
