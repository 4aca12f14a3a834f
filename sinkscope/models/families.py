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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from sinkscope.errors import InputError

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


PREFIX = "sinkscope_"


def base_type(model_type: str) -> str:
    """`sinkscope_llama` → `llama`; any other is its own."""
    return model_type.removeprefix(PREFIX)


def is_retrofitted(config: Any) -> bool:
    return str(getattr(config, "model_type", "")).startswith(PREFIX)
