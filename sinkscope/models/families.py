"""Where each architecture keeps its layers and sites. Adding a family = adding one row to `FAMILIES`.

A site is written as `module.path.input` or `module.path.output`, relative to one layer; the bare words `input` and
`output` are the layer's own. Where a module returns a tuple its first tensor is meant. Every row was found by
checking the wiring equation numerically (`check_wiring`), and the tests do so again for every row:

    sequential   mid = layer_in + attn_out     layer_out = mid + mlp_out
    parallel     (no mid)                      layer_out = layer_in + attn_out + mlp_out
    post-norm    mid = layer_in + attn_out     layer_out = norm(norm(mid) + mlp_out)
    single       (no mid)                      layer_out = layer_in + the output of one branch
    unknown      what a layer adds is no such sum: only layer_in and layer_out are read

Sandwich-norm families (Gemma 2/3, OLMo 2) are sequential here: what is added to the residual stream is the
output of the norm behind the branch.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from sinkscope.errors import InputError
from sinkscope.models.model_types import base_type
from sinkscope.models.streams import Copies
from sinkscope.models.towers import is_own, text_tower, token_embedding, within

# In the order in which a forward pass reaches them. Attention's own sites are in attention/seam.py.
RESIDUAL_SITES = ("layer_in", "attn_norm", "attn_out", "mid", "mlp_norm", "mlp_out", "layer_out")


ATTENTION, NOT_RUN = "attention", "not run"  # kinds of a layer; the second stands aside when text is read alone
NO_POSITIONS, UNKNOWN_POSITIONS = "none", "unknown"  # kinds of positions
FEED_FORWARD = ("mlp", "moe", "feed_forward")  # kinds of layers that mix no tokens, as configurations name them


@dataclass(frozen=True)
class Term:
    """A module's output, multiplied before it is added to the residual stream."""

    address: str
    scale: float


Role = Literal["query", "key", "value"]


@dataclass(frozen=True)
class Outputs:
    """Which outputs of a module, within the attention module, are an attention layer's queries, keys or values."""

    module: str
    places: tuple[tuple[int, ...], ...]  # by head, its d outputs


@dataclass(frozen=True)
class Block:
    """How one layer is built. Paths of modules are relative to it.

    A branch that is not just one module's output has its terms in `sums`, those that are read before the last also in
    `sites`, under a name of their own; the branch's own address in `sites` is that of the last term.
    """

    attention: str  # the attention module; "" where the layer has none
    sites: Mapping[str, str]  # site → address, in the order in which a forward pass reaches them
    wiring: str  # see above
    kind: str = ATTENTION  # or what the layer has in its place: linear_attention, mamba, conv, …
    sums: Mapping[str, tuple[Term, ...]] = field(default_factory=dict)  # site → what is added to the stream there

    def terms(self, site: str) -> tuple[Term, ...]:
        return self.sums.get(site) or (Term(self.sites[site], 1.0),)

    def reading_order(self, wanted: Container[str]) -> list[tuple[str, int]]:
        """The wanted sites, each as often as it has terms, with the number of the term that is read."""
        order = {address: place for place, address in enumerate(self.sites.values())}
        steps = [
            (site, at)
            for site in RESIDUAL_SITES
            if site in self.sites and site in wanted
            for at in range(len(self.terms(site)))
        ]
        return sorted(steps, key=lambda step: order[self.terms(step[0])[step[1]].address])


@dataclass(frozen=True)
class Family:
    """One row: how an architecture is built. Paths of modules are relative to a layer unless said otherwise."""

    name: str
    layers: str  # the ModuleList of layers, from the model's root
    attention: str  # the attention module; "" where no layer has one
    sites: Mapping[str, str]  # site → address, in the order in which a forward pass reaches them
    wiring: str = "sequential"  # of the first layer that has attention
    positions: str = "rotary"  # or "learned", "alibi"; of a loaded model all that are found (position_kinds.py)
    layer_positions: tuple[str, ...] = ()  # those found by layer; "" where it has no attention
    door: str = "interface"  # transformers' AttentionInterface, or "interceptor" where a model does not use that
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # in the attention module: three projections, or one for all
    fused: str = ""  # one for all holds "blocks" (all of q, of k, of v) or "groups" (a key head's queries, key, value)
    output: str = "o_proj"  # in the attention module: the projection that reads every head's output, heads in order
    mlp: tuple[str, ...] = ("mlp",)  # the modules that make up the feed-forward network, one after the other
    position_embedding: str = ""  # the embedding of learned positions, from the model's root
    position_offset: int = 0  # its row of position 0
    first_position: int | None = 0  # `position_ids` of a sequence's first token; None: they cannot be given
    scaling: float | None = None  # of q·k; None: 1/√d
    when: Mapping[str, Any] = field(default_factory=dict)  # config attributes that this row's wiring requires
    causal: bool = True  # whether a token sees only those before it; False: an encoder, which attends both ways
    gated: bool = False  # whether a gate of the model's own multiplies what `output` reads
    blocks: tuple[Block, ...] = ()  # of every layer, where they are not all as this row says
    projections: Mapping[int, Mapping[Role, Outputs]] = field(default_factory=dict)  # layer → role → found numerically
    copies: Copies | None = None  # of the residual stream, where there are several

    def block(self, layer: int) -> Block:
        return self.blocks[layer] if self.blocks else Block(self.attention, self.sites, self.wiring)

    def last_layer(self, model: nn.Module) -> int:
        """The last one that runs."""
        return max(at for at in range(len(self.layer_modules(model))) if self.block(at).kind != NOT_RUN)

    def positions_at(self, layer: int) -> str:
        """The kind of positions of a layer with attention."""
        return self.layer_positions[layer] if self.layer_positions else self.positions

    @property
    def kinds_of_positions(self) -> set[str]:
        """Of all layers with attention."""
        return set(self.layer_positions) - {""} or {self.positions}

    def attentions(self, model: nn.Module) -> dict[int, nn.Module]:
        """Layer → its attention module, of the layers that have one."""
        layers = enumerate(self.layer_modules(model))
        return {at: layer.get_submodule(path) for at, layer in layers if (path := self.block(at).attention)}

    @property
    def has_attention(self) -> bool:
        return bool(self.attention)

    def layer_modules(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule(self.layers).children())

    def stream(self, x: torch.Tensor) -> torch.Tensor:
        """What is read at a site of the residual stream: the mean of the copies, where there are several."""
        return x if self.copies is None else self.copies.stream(x)

    @property
    def mixes_by_attention_alone(self) -> bool:
        """Whether no layer mixes tokens in another way."""
        return all(block.kind in (ATTENTION, NOT_RUN, *FEED_FORWARD) for block in self.blocks)

    def absent_sites(self) -> dict[str, str]:
        """Residual-stream sites that this family does not have, with the reason."""
        alone = "no layer has two branches, so h+½ does not exist"
        reasons = {
            "attn_out": "no layer mixes tokens in a branch of its own",
            "mlp_out": "no layer has a feed-forward network as a branch of its own",
            "mid": alone
            if self.wiring == "single"
            else "attention and MLP read the same input (parallel residual), so h+½ does not exist",
            "attn_norm": "attention reads the residual stream without a norm in front",
            "mlp_norm": "the MLP reads its input without a norm of its own in front",
        }
        if self.wiring == "unknown":
            reasons = dict.fromkeys(reasons, "what a layer adds to the residual stream is no sum that is known")
        present = {site for block in self.blocks or (self,) for site in block.sites}
        return {site: reasons[site] for site in RESIDUAL_SITES if site not in present}


def _sites(**addresses: str) -> dict[str, str]:
    everywhere = {"layer_in": "input", "layer_out": "output"} | addresses
    return {site: everywhere[site] for site in RESIDUAL_SITES if site in everywhere}


def _sequential(attn_norm: str, attention: str, mlp_norm: str, mlp: str) -> dict[str, str]:
    """Sites of a block in which each branch has a norm in front; what the second norm reads is h+½."""
    return _sites(
        attn_norm=f"{attn_norm}.output",
        attn_out=f"{attention}.output",
        mid=f"{mlp_norm}.input",
        mlp_norm=f"{mlp_norm}.output",
        mlp_out=f"{mlp}.output",
    )


def _parallel(norm: str, attention: str, mlp: str) -> dict[str, str]:
    """Sites of a block whose two branches read one norm."""
    return _sites(attn_norm=f"{norm}.output", attn_out=f"{attention}.output", mlp_out=f"{mlp}.output")


_LLAMA = Family(
    name="llama",
    layers="model.layers",
    attention="self_attn",
    sites=_sequential("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
)
_LLAMA_PARALLEL = replace(_LLAMA, wiring="parallel", sites=_parallel("input_layernorm", "self_attn", "mlp"))
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
_OLMO2 = replace(
    _LLAMA,
    name="olmo2",
    sites=_sites(
        attn_out="post_attention_layernorm.output", mid="mlp.input", mlp_out="post_feedforward_layernorm.output"
    ),
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
    sites=_sequential("ln_1", "attn", "ln_2", "mlp"),
)
_GPT_NEOX = Family(
    name="gpt_neox",
    layers="gpt_neox.layers",
    attention="attention",
    qkv=("query_key_value",),
    fused="groups",
    output="dense",
    sites=_sequential("input_layernorm", "attention", "post_attention_layernorm", "mlp"),
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
    sites=_sequential("self_attn_layer_norm", "self_attn", "final_layer_norm", "fc2"),
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
    # the attention module and the MLP add the residual themselves: their last projections are read
    sites=_sequential("input_layernorm", "self_attention.dense", "post_attention_layernorm", "mlp.dense_4h_to_h"),
    when={"apply_residual_connection_post_layernorm": False},
)
_FALCON = replace(
    _BLOOM,
    name="falcon",
    wiring="parallel",
    positions="rotary",
    # mlp_out is read before the block adds attn_out into that very tensor
    sites=_parallel("input_layernorm", "self_attention", "mlp"),
    when={"parallel_attn": True},
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
    # the MLP adds the residual itself
    sites=_sequential("norm_1", "resid_attn_dropout", "norm_2", "ffn.down_proj"),
)
_GPT_NEO = replace(
    _GPT2,
    name="gpt_neo",
    attention="attn.attention",
    door="interceptor",
    qkv=_LLAMA.qkv,
    fused="",
    output="out_proj",
    scaling=1.0,
)
_GPTJ = replace(
    _GPT_NEO,
    name="gptj",
    attention="attn",
    wiring="parallel",
    positions="rotary",
    position_embedding="",
    scaling=None,
    sites=_parallel("ln_1", "attn", "mlp"),
)

# model type (config.json) → its rows; the first whose `when` holds is the model's.
FAMILIES: dict[str, tuple[Family, ...]] = {
    **{
        name: (replace(_LLAMA, name=name),)
        for name in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss")
    },
    "gemma2": (replace(_GEMMA, name="gemma2"),),
    "gemma3_text": (replace(_GEMMA, name="gemma3"),),
    "gemma3": (replace(_GEMMA, name="gemma3", layers="model.language_model.layers"),),
    "olmo2": (_OLMO2,),
    "phi": (replace(_LLAMA_PARALLEL, name="phi", output="dense"),),
    "phi3": (replace(_LLAMA, name="phi3", qkv=("qkv_proj",), fused="blocks"),),
    "stablelm": (
        replace(_LLAMA, name="stablelm", when={"use_parallel_residual": False}),
        replace(_LLAMA_PARALLEL, name="stablelm", when={"use_parallel_residual": True}),
    ),
    "cohere": (replace(_LLAMA_PARALLEL, name="cohere"),),
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
    "bloom": (_BLOOM,),
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
        _FALCON,
        replace(
            _FALCON,
            wiring="sequential",
            when={"parallel_attn": False, "new_decoder_architecture": False},
            sites=_sequential("input_layernorm", "self_attention", "post_attention_layernorm", "mlp"),
        ),
    ),
    "mpt": (_MPT,),
    "gptj": (_GPTJ,),
    "gpt_neo": (_GPT_NEO,),
}


# type of a text tower → the type whose rows are its own
BUILT_AS = {
    "gemma": "llama",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}


def find_family(model: nn.Module) -> Family:
    """The row of FAMILIES for a loaded model: of its type, or of the type of its text tower.

    Raises:
        InputError: the model type has no row, or none whose `when` holds for this configuration.
    """
    config: Any = model.config
    model_type = base_type(config.model_type)
    rows = FAMILIES.get(model_type) or _rows_of_tower(model)
    config = config if model_type in FAMILIES else config.get_text_config()
    for row in rows:
        if all(getattr(config, name, None) == value for name, value in row.when.items()):
            return replace(row, positions="alibi") if getattr(config, "alibi", False) else row
    if rows:
        wanted = " or ".join(str(dict(row.when)) for row in rows)
        raise InputError(f"no row for a {model_type} wired like this one (there is one for {wanted})")
    raise InputError(
        f"the architecture '{model_type}' has no row in sinkscope/models/families.py "
        f"(`sinkscope list families` shows those that have one)"
    )


def _rows_of_tower(model: Any) -> tuple[Family, ...]:
    """The rows of a text tower's own type, or of the one it is built as, with its place in the whole model."""
    path, tower = text_tower(model)
    kind = tower.config.model_type
    rows = FAMILIES.get(BUILT_AS.get(kind, kind), ()) if path and is_own(tower) else ()
    return tuple(
        replace(
            row,
            name=kind,
            layers=within(tower, path, row.layers),
            position_embedding=within(tower, path, row.position_embedding),
        )
        for row in rows
    )


def embedding_weight(model: Any) -> torch.Tensor:
    """The token embeddings (V,D).

    Raises:
        InputError: there are none, or they are not one table.
    """
    embedding: Any = token_embedding(model)
    if embedding is None:
        raise InputError("it has no token embeddings")
    if not hasattr(embedding, "weight"):
        raise InputError(f"{type(model).__name__} embeds its tokens by more than one table")
    return embedding.weight


def first_tensor(value: Any) -> torch.Tensor:
    """A module's own result where it returns several."""
    return value[0] if isinstance(value, tuple | list) else value
