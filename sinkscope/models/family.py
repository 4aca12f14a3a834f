"""How a model is built: its layers, the sites of the residual stream in each, and its attention modules.

A site is written as `module.path.input` or `module.path.output`, relative to one layer; the bare words `input` and
`output` are the layer's own. If a module returns a tuple, its first tensor is meant.

    sequential   mid = layer_in + attn_out     layer_out = mid + mlp_out
    parallel     (no mid)                      layer_out = layer_in + attn_out + mlp_out
    post-norm    mid = layer_in + attn_out     out_sum = norm(mid) + mlp_out     layer_out = norm(out_sum)
    single       (no mid)                      layer_out = layer_in + the output of one branch
    unknown      no such sum was found: layer_in and layer_out are read, and branches only where they are added

Some models keep the residual stream in several copies: hyper-connections (Zhu et al. 2024), AltUp (Baykal et al. 2023).
Each layer reads a mixture of the copies and writes to all of them. The residual stream that is measured is their mean:
it has the size of one copy, these models begin with it (the embedding, repeated), and it does not depend on the order
or the number of the copies.

The text tower is the part of a model for pictures or sound that reads the token embeddings: among the nested
transformers models that contain them, it is the outermost with the same configuration as the innermost. For a plain
language model it is the model itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.errors import InputError, explained


@dataclass(frozen=True)
class Copies:
    """The copies of the residual stream in a layer's input and output."""

    count: int  # S
    layout: Literal["first", "third", "flat"]  # (S,B,T,D), (B,T,S,D), (B,T,S·D)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape a layer's input or output to (B,T,S,D)."""
        if self.layout == "flat":
            return x.unflatten(-1, (self.count, -1))
        return x.movedim(0, 2) if self.layout == "first" else x

    def stream(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream (B,T,D) of a layer's input or output."""
        return self.split(x).mean(2)


def find_copies(x: torch.Tensor, tokens: torch.Size, width: int) -> Copies | None:
    """Find the copies of a residual stream of this width in a layer's input for tokens (B,T); None if only one."""
    if x.dim() == 4 and x.shape == (*tokens, x.shape[2], width):
        return Copies(x.shape[2], "third")
    if x.dim() == 4 and x.shape == (x.shape[0], *tokens, width):
        return Copies(x.shape[0], "first")
    if x.shape[:-1] == tokens and x.shape[-1] > width and x.shape[-1] % width == 0:
        return Copies(x.shape[-1] // width, "flat")
    return None


# In the order of a forward pass. The sites within attention are in attention/seam.py.
RESIDUAL_SITES = ("layer_in", "attn_norm", "attn_out", "mid", "mlp_norm", "mlp_out", "out_sum", "layer_out")

# Kinds of layers: with attention that is read, or in a form whose weights are not read; without a softmax over tokens;
# that return their input; and that do not run on text
ATTENTION, UNREAD, NO_SOFTMAX = "attention", "unread attention", "no softmax attention"
PASSING, NOT_RUN = "pass-through", "not run"
NO_ATTENTION = "no layer attends by a softmax"
NO_POSITIONS, UNKNOWN_POSITIONS = "none", "unknown"  # kinds of positions
ON_LOGITS = {"alibi", "relative"}  # kinds of positions that are a bias on the logits
FEED_FORWARD = ("mlp", "moe", "feed_forward")  # kinds of layers that mix no tokens, as configurations name them


class Term(NamedTuple):
    """A module's output, multiplied before it is added to the residual stream."""

    address: str
    scale: float


Role = Literal["query", "key", "value"]


class Outputs(NamedTuple):
    """The outputs of a module that are a layer's queries, keys or values."""

    module: str  # path within the attention module
    places: tuple[tuple[int, ...], ...]  # by head, the indices of its d outputs


@dataclass(frozen=True)
class Block:
    """How one layer is built. Paths of modules are relative to it.

    If a branch is not just one module's output, its terms are in `sums`. Its address in `sites` is that of the last
    term; earlier terms also have entries in `sites`, under other names.
    """

    attention: str  # the attention module; "" if the layer has none whose weights are read
    sites: Mapping[str, str]  # site → address, in the order in which a forward pass reaches them
    wiring: str  # one of the five in the module's docstring
    kind: str = ATTENTION  # or the kind of its replacement: linear_attention, mamba, conv, …
    unread: str = ""  # why no attention weights are read, if the layer mixes tokens by some attention
    sums: Mapping[str, tuple[Term, ...]] = field(default_factory=dict)  # site → the terms added to the stream there

    def terms(self, site: str) -> tuple[Term, ...]:
        return self.sums.get(site) or (Term(self.sites[site], 1.0),)


@dataclass(frozen=True)
class Family:
    """One row: how an architecture is built. Paths of modules are relative to a layer unless stated otherwise."""

    name: str
    layers: str  # the ModuleList of layers, from the model's root
    attention: str  # the attention module; "" if no layer has one
    sites: Mapping[str, str]  # site → address, in the order in which a forward pass reaches them
    wiring: str = "sequential"  # the first attention layer's
    positions: str = "rotary"  # or "learned", "alibi"; for a loaded model all kinds found (position_kinds.py)
    layer_positions: tuple[str, ...] = ()  # the kind found in each layer; "" for a layer without attention
    door: str = "interface"  # transformers' AttentionInterface, or "interceptor" if the model does not use that
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # in the attention module: three projections, or one fused
    fused: str = ""  # layout of a fused one: "blocks" (all of q, of k, of v) or "groups" (a key head's q, k and v)
    # in the attention module: the projection that reads every head's output, heads in order; "" if it is outside the
    # module, which returns the heads' outputs
    output: str = "o_proj"
    mlp: tuple[str, ...] = ("mlp",)  # the modules that make up the feed-forward network, in order
    down: str = "mlp.down_proj"  # the last projection of the feed-forward network
    experts: str = "mlp.experts"  # replaces `down` in a mixture: the module with the projections of all experts
    position_embedding: str = ""  # the embedding of learned positions, from the model's root
    position_offset: int = 0  # its row of position 0
    first_position: int | None = 0  # `position_ids` of a sequence's first token; None: they cannot be given
    scaling: float | None = None  # factor of q·k; None: 1/√d
    when: Mapping[str, Any] = field(default_factory=dict)  # config attributes that this row's wiring requires
    causal: bool = True  # whether a token sees only earlier ones; False: an encoder, which attends both ways
    prefix: int = 0  # how many first tokens are visible to all others (prefix LM)
    gated: bool = False  # whether the model has a gate that multiplies the input of `output`
    blocks: tuple[Block, ...] = ()  # one per layer, if the layers differ
    projections: Mapping[int, Mapping[Role, Outputs]] = field(default_factory=dict)  # layer → role → found numerically
    copies: Copies | None = None  # the copies of the residual stream, if there are several

    def block(self, layer: int) -> Block:
        return self.blocks[layer] if self.blocks else Block(self.attention, self.sites, self.wiring)

    def last_layer(self, model: nn.Module) -> int:  # the last layer that runs
        layers = range(len(self.layer_modules(model)))
        return max(layer for layer in layers if self.block(layer).kind != NOT_RUN)

    def positions_at(self, layer: int) -> str:
        return self.layer_positions[layer] if self.layer_positions else self.positions

    @property
    def kinds_of_positions(self) -> set[str]:
        return set(self.layer_positions) - {""} or {self.positions}

    def attentions(self, model: nn.Module) -> dict[int, nn.Module]:
        """Return layer → attention module, for layers with attention."""
        modules = enumerate(self.layer_modules(model))
        return {layer: module.get_submodule(path) for layer, module in modules if (path := self.block(layer).attention)}

    @property
    def has_attention(self) -> bool:
        return bool(self.attention)

    @property
    def without_attention(self) -> str | None:
        """Why no layer's attention can be read, or None if that of some layer can."""
        reasons = (f"layer {layer}: {block.unread}" for layer, block in enumerate(self.blocks) if block.unread)
        return None if self.has_attention else next(reasons, NO_ATTENTION)

    def without(self, unread: Mapping[int, str], model: nn.Module) -> "Family":
        """Return the family without the attention of the layers in `unread`, which maps each layer to the reason."""
        if not unread:
            return self
        blocks = [self.block(layer) for layer in range(len(self.layer_modules(model)))]
        for layer, reason in unread.items():
            blocks[layer] = replace(blocks[layer], attention="", kind=UNREAD, unread=reason)
        main = next((block for block in blocks if block.attention), blocks[0])
        fields: dict[str, Any] = {"attention": main.attention, "sites": main.sites, "wiring": main.wiring}
        fields |= {} if main.attention else {"positions": UNKNOWN_POSITIONS, "qkv": (), "output": "", "gated": False}
        return replace(self, blocks=tuple(blocks), **fields)

    def layer_modules(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule(self.layers).children())

    def stream(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream for a tensor at one of its sites: the mean of the copies if there are several."""
        return x if self.copies is None else self.copies.stream(x)

    @property
    def mixes_by_attention_alone(self) -> bool:
        """Whether attention is the only operation that mixes tokens, in all layers."""
        return all(block.kind in (ATTENTION, PASSING, NOT_RUN, *FEED_FORWARD) for block in self.blocks)

    def absent_sites(self) -> dict[str, str]:
        """Return the residual-stream sites that this family does not have, with the reason."""
        reasons = {
            "attn_out": "no layer mixes tokens in a separate branch",
            "mlp_out": "no layer has a feed-forward network as a separate branch",
            "mid": "no layer has two branches, so h+½ does not exist"
            if self.wiring == "single"
            else "attention and MLP read the same input (parallel residual), so h+½ does not exist",
            "attn_norm": "attention reads the residual stream without a norm before it",
            "mlp_norm": "the MLP has no norm of its own before it",
            "out_sum": "no norm follows a layer's last sum, which is its output",
        }
        if self.wiring == "unknown":
            reasons = dict.fromkeys(reasons, "it is not known which sum a layer adds to the residual stream")
        present = {site for block in self.blocks or (self,) for site in block.sites}
        return {site: reasons[site] for site in RESIDUAL_SITES if site not in present}


def embedding_weight(model: Any) -> torch.Tensor:
    """Return the token embeddings (V,D); raise InputError if the model has no table of them, or several."""
    embedding: Any = token_embedding(model)
    if embedding is None:
        raise InputError("it has no token embeddings")
    if not hasattr(embedding, "weight"):
        raise InputError(f"{type(model).__name__} embeds its tokens by more than one table")
    return embedding.weight


def input_device(model: Any) -> torch.device:
    """Return the device on which the model expects its token ids."""
    device = embedding_weight(model).device
    return torch.device("cpu") if device.type == "meta" else device  # offloaded: accelerate moves the inputs


def first_tensor(value: Any) -> torch.Tensor:
    """Return a module's output, or the first tensor of several outputs."""
    return value[0] if isinstance(value, tuple | list) else value


def rotary_limits(config: Any) -> dict[str, int]:
    """Return the lengths past which all rotary frequencies depend on the longest sequence of a batch, by rope type."""
    text = config.get_text_config()
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    limits: dict[str, int] = {}
    for row in [rope, *(row for row in rope.values() if isinstance(row, dict))]:  # one, or one per type of layer
        kind = row.get("rope_type")
        if kind == "dynamic":
            limits[kind] = text.max_position_embeddings
        elif kind == "longrope":
            limits[kind] = row["original_max_position_embeddings"]
    return limits


@contextmanager
def fresh_rotary_frequencies(model: nn.Module) -> Iterator[None]:
    """Reset dynamic rotary frequencies before each call in the block; otherwise the longest earlier call sets them."""
    is_dynamic = "dynamic" in rotary_limits(model.config)
    stretched = [module for module in model.modules() if is_dynamic and hasattr(module, "original_max_seq_len")]

    def reset(*_: Any) -> None:
        for module in stretched:
            for name in [name for name in (*vars(module), *module._buffers) if name.endswith("original_inv_freq")]:
                prefix = name.removesuffix("original_inv_freq")
                setattr(module, f"{prefix}inv_freq", getattr(module, name).to(getattr(module, f"{prefix}inv_freq")))
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)

    with model.register_forward_pre_hook(reset) if stretched else nullcontext():
        yield


def number_of_positions(model: Any, family: Family | None = None) -> int | None:
    """Return how many positions a model's configuration allows from `first_position` on; None if unlimited."""
    text = model.config.get_text_config()
    if "dynamic" in rotary_limits(model.config):  # it is the length from which frequencies change
        return None
    limits = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    before = (family and family.first_position) or 0
    return next((limit - before for limit in limits if limit), None)


# --- the text tower

RETROFITTED = "sinkscope_"  # prefix of the model types of retrofitted models

# Model types with text towers that may be of a family with a row: their retrofitted models can be loaded again
WITH_TOWERS = (
    *("got_ocr2", "idefics2", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3"),
    *("paligemma", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "vipllava", "voxtral"),
)

# Arguments that a model needs so that text is read causally: model type → argument → its value for every token.
# PaliGemma attends both ways in a prompt (0) and causally after it (1). Without the argument it attends both ways under
# SDPA, but causally under eager or in a padded batch.
TEXT_ARGUMENTS: Mapping[str, Mapping[str, int]] = {"paligemma": {"token_type_ids": 1}}


def base_type(model_type: str) -> str:
    """Return `llama` for `sinkscope_llama`, and any other model type unchanged."""
    return model_type.removeprefix(RETROFITTED)


def is_retrofitted(config: Any) -> bool:
    return str(getattr(config, "model_type", "")).startswith(RETROFITTED)


def text_tower(model: PreTrainedModel) -> tuple[str, PreTrainedModel]:
    """Return path and module of the text tower; "" and the model if the tower is the whole model."""
    parts = embedding_path(model).split(".")
    outer = [".".join(parts[:count]) for count in range(len(parts))]
    modules = [(path, module) for path in outer if isinstance(module := model.get_submodule(path), PreTrainedModel)]
    return next((path, module) for path, module in modules if module.config is modules[-1][1].config)


def token_embedding(model: PreTrainedModel) -> nn.Module:
    """Return the module that embeds the tokens; raise InputError if transformers cannot find it."""
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError) as error:
        raise InputError(f"{type(model).__name__} has no token embeddings that transformers knows") from error


def token_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the output embeddings of a model or of the language model in it; None if nothing predicts tokens."""
    networks = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return next((head for network in networks if (head := network.get_output_embeddings()) is not None), None)


def vocabulary(model: PreTrainedModel) -> int:
    """Return how many token ids a model both reads and predicts; some also embed placeholders of pictures."""
    tables: Any = (token_embedding(model), token_head(model))
    # dynamic quantization has a method in the place of the weight
    return min(len(weight) for table in tables if isinstance(weight := getattr(table, "weight", None), torch.Tensor))


def placeholders(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids of placeholders or marks of pictures or sound, which are not text."""
    if not text_tower(model)[0]:
        return ()
    entries = model.config.to_dict().items()
    return tuple(x for name, x in entries if name.endswith(("_token_id", "_token_index")) and isinstance(x, int))


def embedding_path(model: PreTrainedModel) -> str:
    """Return the path of the token embeddings; raise InputError if transformers cannot find them."""
    embedding = token_embedding(model)
    path = next((path for path, module in model.named_modules() if module is embedding), None)
    if path is None:
        raise InputError(f"{type(model).__name__} has no module that embeds its tokens")
    return path


def tower_notice(model: PreTrainedModel) -> tuple[str, ...]:
    path, tower = text_tower(model)
    kind, part = type(model).__name__, type(tower).__name__
    return (f"{kind}: its text tower is measured ({part} at '{path}'), on text only",) if path else ()


# what a model raises for inputs that it cannot read
WRONG_INPUTS = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError)


@torch.no_grad()
def read_a_token(model: PreTrainedModel) -> tuple[set[str], Any]:
    """Run the model on one token of text, and return the paths of the modules that run, and the model's output."""
    reached: set[str] = set()
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(lambda module, args, path=path: reached.add(path)))
        output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    return reached, output


def check_reads_text(model: PreTrainedModel, layers: str) -> None:
    """Raise InputError unless text alone runs through the text tower's layers, and the model predicts next tokens."""
    if not text_tower(model)[0]:
        return
    with explained(f"{type(model).__name__} does not read text alone", WRONG_INPUTS):
        reached, output = read_a_token(model)
    if not any(path.startswith(f"{layers}.") for path in reached):
        raise InputError(f"{type(model).__name__}: text does not pass the layers at '{layers}'")
    logits = getattr(output, "logits", None)
    if logits is None or logits.shape[:2] != (1, 1):
        raise InputError(f"{type(model).__name__} does not predict the token after each that it reads")


def text_arguments(model: nn.Module) -> Mapping[str, int]:
    """Return this model's entry of TEXT_ARGUMENTS, or {}, as for most models."""
    return TEXT_ARGUMENTS.get(base_type(str(getattr(getattr(model, "config", None), "model_type", ""))), {})


@contextmanager
def with_text_arguments(model: nn.Module) -> Iterator[None]:
    """Add the arguments of TEXT_ARGUMENTS to calls of the model that lack them, within the block."""
    arguments = text_arguments(model)

    def add_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            return args, kwargs
        return args, {name: torch.full_like(ids, value) for name, value in arguments.items()} | kwargs

    with model.register_forward_pre_hook(add_arguments, with_kwargs=True) if arguments else nullcontext():
        yield
