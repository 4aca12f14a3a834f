"""The layers and sites of each known architecture. A new family is one row of `FAMILIES`.

Every row satisfies the wiring equation (head of family.py) numerically (`check_wiring`); the tests check this for every
row. Sandwich-norm families (Gemma 2/3, OLMo 2) are sequential here: the output of the norm after the branch is added to
the residual stream.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from sinkscope.errors import InputError
from sinkscope.models.edits import LIBRARIES, defining_module, forward_of, name_of
from sinkscope.models.family import Family, base_type, text_tower
from sinkscope.models.varied_llama import MODEL_TYPE as VARIED_LLAMA


def _sites(**addresses: str) -> dict[str, str]:
    return {"layer_in": "input", **addresses, "layer_out": "output"}


def _sequential(attn_norm: str, attention: str, mlp_norm: str, mlp: str) -> dict[str, str]:
    """Return the sites of a block with a norm before each branch; the second norm reads h+½."""
    return _sites(
        attn_norm=f"{attn_norm}.output",
        attn_out=f"{attention}.output",
        mid=f"{mlp_norm}.input",
        mlp_norm=f"{mlp_norm}.output",
        mlp_out=f"{mlp}.output",
    )


def _parallel(norm: str, attention: str, mlp: str) -> dict[str, str]:
    """Return the sites of a block whose two branches read one norm."""
    return _sites(attn_norm=f"{norm}.output", attn_out=f"{attention}.output", mlp_out=f"{mlp}.output")


# --- the rows that others are made from

_NORMS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_LLAMA_ROW = Family(name="llama", layers="model.layers", attention="self_attn", sites=_sequential(*_NORMS))
_LLAMA_PARALLEL = replace(_LLAMA_ROW, wiring="parallel", sites=_parallel("input_layernorm", "self_attn", "mlp"))
_SANDWICHED = _sequential("input_layernorm", "self_attn", "pre_feedforward_layernorm", "mlp") | {
    "attn_out": "post_attention_layernorm.output", "mlp_out": "post_feedforward_layernorm.output",
}  # fmt: skip
_GEMMA = replace(_LLAMA_ROW, name="gemma3", sites=_SANDWICHED)
_OLMO2_SITES = {site: address for site, address in _SANDWICHED.items() if site not in ("attn_norm", "mlp_norm")}
_GPT2 = Family(
    name="gpt2", layers="transformer.h", attention="attn", sites=_sequential("ln_1", "attn", "ln_2", "mlp"),
    positions="learned", position_embedding="transformer.wpe",
    qkv=("c_attn",), fused="blocks", output="c_proj", down="mlp.c_proj",
)  # fmt: skip
_GPT_NEO = replace(
    _GPT2, name="gpt_neo", attention="attn.attention", door="interceptor",
    qkv=_LLAMA_ROW.qkv, fused="", output="out_proj", scaling=1.0,
)  # fmt: skip
_GPTJ = replace(
    _GPT_NEO, name="gptj", attention="attn", wiring="parallel", sites=_parallel("ln_1", "attn", "mlp"),
    positions="rotary", position_embedding="", down="mlp.fc_out", scaling=None,
)  # fmt: skip
_GPT_NEOX = Family(
    name="gpt_neox", layers="gpt_neox.layers", attention="attention", when={"use_parallel_residual": False},
    sites=_sequential("input_layernorm", "attention", "post_attention_layernorm", "mlp"),
    qkv=("query_key_value",), fused="groups", output="dense", down="mlp.dense_4h_to_h",
)  # fmt: skip
_OPT_ROW = Family(
    name="opt", layers="model.decoder.layers", attention="self_attn", when={"do_layer_norm_before": True},
    sites=_sequential("self_attn_layer_norm", "self_attn", "final_layer_norm", "fc2"),
    positions="learned", position_embedding="model.decoder.embed_positions", position_offset=2,
    output="out_proj", mlp=("fc1", "activation_fn", "fc2"), down="fc2",
)  # fmt: skip
_BLOOM = Family(
    name="bloom", layers="transformer.h", attention="self_attention",
    # the attention module and the MLP add the residual themselves, so their last projections are read
    sites=_sequential("input_layernorm", "self_attention.dense", "post_attention_layernorm", "mlp.dense_4h_to_h"),
    when={"apply_residual_connection_post_layernorm": False},
    positions="alibi", door="interceptor",
    qkv=("query_key_value",), fused="groups", output="dense", down="mlp.dense_4h_to_h",
)  # fmt: skip
_FALCON = replace(
    _BLOOM, name="falcon", wiring="parallel", positions="rotary", when={"parallel_attn": True},
    # mlp_out is read before the block adds attn_out to it in place
    sites=_parallel("input_layernorm", "self_attention", "mlp"),
)  # fmt: skip
_MPT = Family(
    name="mpt", layers="transformer.blocks", attention="attn", positions="alibi", door="interceptor",
    sites=_sequential("norm_1", "resid_attn_dropout", "norm_2", "ffn.down_proj"),  # the MLP adds the residual itself
    qkv=("Wqkv",), fused="blocks", output="out_proj", mlp=("ffn",), down="ffn.down_proj",
)  # fmt: skip
_BERT_ROW = Family(
    name="bert", layers="bert.encoder.layer", attention="attention.self", wiring="post-norm", causal=False,
    when={"is_decoder": False},
    sites=_sites(
        attn_out="attention.output.dense.output", mid="attention.output.LayerNorm.input",
        mlp_out="output.dense.output", out_sum="output.LayerNorm.input",
    ),
    positions="learned", position_embedding="bert.embeddings.position_embeddings",
    qkv=("query", "key", "value"), output="",  # the output projection is outside the attention module
    mlp=("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"), down="output.dense",
)  # fmt: skip
_VARIED = replace(
    _LLAMA_ROW, name=VARIED_LLAMA, when={"norm_placement": "pre"},
    sites=_sequential("attention_norm", "self_attn", "mlp_norm", "mlp"),
)  # fmt: skip

# model type (config.json) → its rows, of which the first whose `when` matches is used
FAMILIES: dict[str, tuple[Family, ...]] = {
    **{
        name: (replace(_LLAMA_ROW, name=name),)
        for name in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss")
    },
    "gemma2": (replace(_GEMMA, name="gemma2"),),
    "gemma3_text": (_GEMMA,),
    "gemma3": (replace(_GEMMA, layers="model.language_model.layers"),),
    "olmo2": (replace(_LLAMA_ROW, name="olmo2", sites=_OLMO2_SITES | {"mid": "mlp.input"}),),
    "phi": (replace(_LLAMA_PARALLEL, name="phi", output="dense", down="mlp.fc2"),),
    "phi3": (replace(_LLAMA_ROW, name="phi3", qkv=("qkv_proj",), fused="blocks"),),
    "stablelm": (
        replace(_LLAMA_ROW, name="stablelm", when={"use_parallel_residual": False}),
        replace(_LLAMA_PARALLEL, name="stablelm", when={"use_parallel_residual": True}),
    ),
    "cohere": (replace(_LLAMA_PARALLEL, name="cohere"),),
    "gpt2": (_GPT2,),
    "gpt_neox": (
        replace(_GPT_NEOX, wiring="parallel", when={"use_parallel_residual": True}, sites=_sites(
            attn_norm="input_layernorm.output", attn_out="attention.output",
            mlp_norm="post_attention_layernorm.output", mlp_out="mlp.output",
        )),
        _GPT_NEOX,
    ),
    "opt": (
        _OPT_ROW,
        replace(_OPT_ROW, wiring="post-norm", when={"do_layer_norm_before": False}, sites=_sites(  # OPT-350M
            attn_out="self_attn.output", mid="self_attn_layer_norm.input", mlp_out="fc2.output",
            out_sum="final_layer_norm.input",
        )),
    ),
    "bloom": (_BLOOM,),
    "falcon": (
        replace(_FALCON, when={"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2}, sites=_sites(
            # both norms run before attention does
            attn_norm="ln_attn.output", mlp_norm="ln_mlp.output",
            attn_out="self_attention.output", mlp_out="mlp.output",
        )),
        _FALCON,
        replace(
            _FALCON, wiring="sequential", when={"parallel_attn": False, "new_decoder_architecture": False},
            sites=_sequential("input_layernorm", "self_attention", "post_attention_layernorm", "mlp"),
        ),
    ),
    "mpt": (_MPT,),
    "gptj": (_GPTJ,),
    "gpt_neo": (_GPT_NEO,),
    "bert": (_BERT_ROW,),
    VARIED_LLAMA: (
        _VARIED,
        replace(_VARIED, wiring="post-norm", when={"norm_placement": "post"}, sites=_sites(
            attn_out="self_attn.output", mid="attention_norm.input", mlp_out="mlp.output",
            out_sum="mlp_norm.input",
        )),
    ),
}  # fmt: skip


# type of a text tower → the type whose rows it uses
BUILT_AS = {
    "gemma": "llama",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}

# types whose checkpoints store the gains of norms as their difference from 1, and gate and up of a neuron side by side
CENTERED_GAINS = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "minimax_m3_vl_text", "nemotron", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "step3p5", "vaultgemma",
}  # fmt: skip
INTERLEAVED_GATES = {"gpt_oss"}
INPUTS_FIRST = {"gpt2", "gpt_oss"}  # types whose feed-forward matrices are (in, out)


def find_family(model: Any) -> Family:
    """Return the row of FAMILIES for a loaded model, by its type or its text tower's; raise InputError if none fits."""

    place, tower = "", model

    def within(path: str) -> str:  # model or tower may lack the language model's head
        head, _, rest = path.partition(".")
        return path and f"{place}.{path if head in tower._modules else rest}".removeprefix(".")

    config: Any = model.config
    model_type = base_type(config.model_type)
    rows = FAMILIES.get(model_type, ())
    if not rows:  # rows of the text tower, with paths in the whole model
        place, tower = text_tower(model)
        config, kind = config.get_text_config(), tower.config.model_type
        known = FAMILIES.get(BUILT_AS.get(kind, kind), ()) if place else ()
        # the row is that of a language model only if the tower and its configuration are from one package
        if type(tower).__module__.rpartition(".")[0] == type(tower.config).__module__.rpartition(".")[0]:
            rows = tuple(replace(row, name=kind) for row in known)
    for row in rows:
        if all(getattr(config, name, None) == value for name, value in row.when.items()):
            kind = "alibi" if getattr(config, "alibi", False) else getattr(config, "kind_of_positions", row.positions)
            row = replace(row, layers=within(row.layers), position_embedding=within(row.position_embedding))
            return replace(row, positions=kind, prefix=getattr(config, "prefix_length", 0))
    if rows:
        wanted = " or ".join(str(dict(row.when)) for row in rows)
        raise InputError(f"there is no row for a {model_type} wired like this one (only for {wanted})")
    raise InputError(
        f"the architecture '{model_type}' has no row in sinkscope/models/families.py "
        f"(`sinkscope list families` shows those that have one)"
    )


def row_mismatch(model: nn.Module, row: Family) -> str | None:
    """Return how this model's layers differ from its row, for example by a module that the user has removed."""
    holders: dict[nn.Module, str] = {}
    try:
        layers = [*model.get_submodule(row.layers)._modules.values()]  # `children` leaves out the same module again
    except AttributeError:
        layers = []
    if not layers:
        return f"it has no layers at '{row.layers}'"
    for number, layer in enumerate(layers):
        assert layer is not None
        block, parts = row.block(number), dict(layer.named_modules(remove_duplicate=False))
        paths = {address.rpartition(".")[0] for address in block.sites.values()} | {block.attention}
        for path in sorted(paths):
            place = f"layer {number}" + (f" at '{path}'" if path else "")
            if path not in parts:
                return f"{place} has no module"
            if parts[path] in holders:
                return f"{place} is the same module as {holders[parts[path]]}"
            holders[parts[path]] = place
        for path in ("", block.attention):
            if not defining_module(forward := forward_of(parts[path])).startswith(LIBRARIES):
                return f"{name_of(forward)} is the forward of layer {number}" + (f" at '{path}'" if path else "")
    return None
