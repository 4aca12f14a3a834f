"""Cost of the same numbers with other tools: `python tests/benchmarks/peers.py [MODEL]`, a Llama; default the demo's.

- bare: the fused forward without logits; nothing is read.
- sinkscope: all forward observables, at 16 positions or at all.
- output_attentions: transformers' eager attention with all weights and hidden states kept, reduced after the pass;
  only layers' inputs and outputs are read, without branches, norms, q, k, v.
- hooks: eager attention and PyTorch's hooks, with each layer reduced at once: weights, the five sites of the
  residual stream, the outputs of both norms, the norms of q, k, v. The cosine of q and k and the logit gap are missing,
  because there is no module to hook between rotary and softmax.
- TransformerLens: the same tensors and reductions as hooks, by `run_with_hooks`, or by `run_with_cache` of only these
  tensors, reduced after the pass; its bridge is around the same transformers model.

Only sinkscope also computes values by sequence for intervals, every sink position in every head, the padding of
batches, and geometry. All reductions except sinkscope's are written as one would by hand, and their numbers are
compared with sinkscope's first. TransformerLens must be installed in the environment that runs this; otherwise its rows
are left out. Printed are CPU time of one thread, with the rows of a round one after the other, and peak memory, each in
a separate process. README.md has the results.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import torch
import transformers
from common import FORWARD, bare_forward, numbers_of, peak_of, random_batch
from torch import nn

import sinkscope.models.loading
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.text.batch import Batch

try:
    import transformer_lens
    from transformer_lens.model_bridge import TransformerBridge
except ImportError:
    transformer_lens = None
POSITIONS, WINDOW, EPSILON = 16, 64, 0.3
SHAPES = {(8, 64): 7, (1, 1024): 3, (1, 4096): 1}  # shape → rounds
KEEPS_ALL = ("output_attentions", "TransformerLens, run_with_cache")  # not run at 4,096 tokens: 18 GB of weights
LENS_SITES = {
    "hook_resid_pre": "layer_in", "ln1.hook_out": "attn_norm", "attn.hook_q": "query", "attn.hook_k": "key",
    "attn.hook_v": "value", "attn.hook_pattern": "weights", "hook_attn_out": "attn_out", "hook_resid_mid": "mid",
    "ln2.hook_out": "mlp_norm", "hook_mlp_out": "mlp_out", "hook_resid_post": "layer_out",
}  # fmt: skip

Found = dict[tuple[int, str, str], torch.Tensor]  # by layer, site and statistic
Pass = Callable[[], tuple[float, Found]]  # CPU seconds and the statistics


def of_attention(weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the statistics of weights (B,H,T,T) by head, at the first positions."""
    place = torch.arange(weights.shape[-1])
    near = (place[:, None] - place < WINDOW).tril()
    queries = len(place) - place
    window_mass = ((weights * near).sum(2) / queries.clamp(max=WINDOW))[..., :POSITIONS]
    return {
        "window_mass": window_mass.mean(0),
        "sink_rate": (window_mass > EPSILON).float().mean(0),
        "sink_mass": (weights.sum(2) / queries)[..., :POSITIONS].mean(0),
        "second_moment": (weights.square().sum(2) / queries)[..., :POSITIONS].mean(0),
        "entropy": -torch.xlogy(weights, weights).sum(-1).mean((0, 2)),
    }


def of_site(site: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the statistics of (B,T,D), or of (B,T,H,d) for query, key and value."""
    if site == "weights":
        return of_attention(x)
    norms = x[:, :POSITIONS].norm(dim=-1)
    if site in ("query", "key", "value"):
        return {"norm": norms.mean(0)}
    centered = x - x.mean((1, 2), keepdim=True)
    kurtosis = centered.pow(4).mean((1, 2)) / centered.square().mean((1, 2)).square()
    found = {"largest": x.abs().amax((1, 2)).mean(), "kurtosis": kurtosis.mean()}
    if not site.endswith("norm"):
        found |= {"norm_mean": norms.mean(0), "norm_max": norms.amax(0)}
    if site == "layer_out":
        magnitudes = x.abs().flatten(1)
        found |= {"top": magnitudes.topk(3).values, "median": magnitudes.median(dim=1).values}
    return found


def reduce(found: Found, layer: int, site: str, x: torch.Tensor) -> None:
    found |= {(layer, site, name): value for name, value in of_site(site, x).items()}


def timed(one_pass: Callable[[Found], None]) -> Pass:
    def measured() -> tuple[float, Found]:
        found: Found = {}
        start = time.process_time()
        one_pass(found)
        return time.process_time() - start, found

    return measured


def sinkscope_pass(model: nn.Module, ids: torch.Tensor, positions: int) -> Pass:
    """Return a pass inside an open tracer; a run opens it once, so opening it is not timed."""

    def measured() -> tuple[float, Found]:
        family, batch = find_family(model), Batch(ids, torch.ones_like(ids))
        observables = [OBSERVABLES[name](Settings(positions=positions, window=WINDOW)) for name in FORWARD]
        with open_tracer(model, family) as tracer:
            start = time.process_time()
            tracer.forward(batch, observables)
            seconds = time.process_time() - start
        return seconds, from_tables(observables, len(family.layer_modules(model)))

    return measured


def from_tables(observables: list[Observable], layers: int) -> Found:
    """Return the numbers that are compared with the other tools', one of each kind."""
    tables = {name: table for observable in observables for name, table in observable.tables().items()}
    found: Found = {}
    for layer in range(layers):
        own = {name: table[table["layer"] == layer] for name, table in tables.items() if "layer" in table}
        mass = own["attention"][own["attention"]["position"] < POSITIONS]["sink_mass"].to_numpy()
        sites = {name: own[name].set_index("site") for name in ("activation", "outlier", "outlier_norms")}
        found[layer, "weights", "sink_mass"] = torch.tensor(mass).view(-1, POSITIONS)
        for site in ("layer_in", "attn_out", "mid", "mlp_out", "layer_out"):
            norms = sites["activation"].loc[site]["norm_mean"].to_numpy()[:POSITIONS]
            found[layer, site, "norm_mean"] = torch.tensor(norms)
            found[layer, site, "kurtosis"] = torch.tensor(sites["outlier"].loc[site]["kurtosis"])
    return found


def output_attentions(model: nn.Module, ids: torch.Tensor, found: Found) -> None:
    out = model(input_ids=ids, use_cache=False, logits_to_keep=1, output_attentions=True, output_hidden_states=True)
    for layer, weights in enumerate(out.attentions):
        reduce(found, layer, "weights", weights)
        reduce(found, layer, "layer_in", out.hidden_states[layer])
        if layer + 1 < len(out.attentions):  # the output of the last layer is after the final norm
            reduce(found, layer, "layer_out", out.hidden_states[layer + 1])


def hooks(model: nn.Module, ids: torch.Tensor, found: Found) -> None:
    with ExitStack() as stack:
        for layer, block in enumerate(model.model.layers):
            for handle in hook_block(block, layer, found):
                stack.callback(handle.remove)
        model(input_ids=ids, use_cache=False, logits_to_keep=1)


def hook_block(block: nn.Module, layer: int, found: Found) -> list[Any]:
    attention = block.self_attn

    def given(site: str, at: int | None = None, heads: bool = False) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            x = output if at is None else output[at]
            reduce(found, layer, site, x.unflatten(-1, (-1, attention.head_dim)) if heads else x)

        return hook

    def taken(site: str) -> Callable[..., None]:
        return lambda module, args: reduce(found, layer, site, args[0])

    return [
        block.register_forward_pre_hook(taken("layer_in")),
        block.input_layernorm.register_forward_hook(given("attn_norm")),
        attention.q_proj.register_forward_hook(given("query", heads=True)),
        attention.k_proj.register_forward_hook(given("key", heads=True)),
        attention.v_proj.register_forward_hook(given("value", heads=True)),
        attention.register_forward_hook(given("attn_out", 0)),
        attention.register_forward_hook(given("weights", 1)),
        block.post_attention_layernorm.register_forward_pre_hook(taken("mid")),
        block.post_attention_layernorm.register_forward_hook(given("mlp_norm")),
        block.mlp.register_forward_hook(given("mlp_out")),
        block.register_forward_hook(given("layer_out")),
    ]


def lens_places(bridge: Any) -> dict[str, tuple[int, str]]:
    """Return TransformerLens's name → layer and site."""
    names = LENS_SITES.items()
    return {f"blocks.{layer}.{name}": (layer, site) for layer in range(bridge.cfg.n_layers) for name, site in names}


def lens_hooks(bridge: Any, ids: torch.Tensor, found: Found) -> None:
    def hook_at(layer: int, site: str) -> Callable[..., None]:
        return lambda x, hook: reduce(found, layer, site, x)

    bridge.run_with_hooks(ids, fwd_hooks=[(name, hook_at(*place)) for name, place in lens_places(bridge).items()])


def lens_cache(bridge: Any, ids: torch.Tensor, found: Found) -> None:
    places = lens_places(bridge)
    _, cache = bridge.run_with_cache(ids, names_filter=list(places))
    for name, place in places.items():
        reduce(found, *place, cache[name])


def passes_of(loaded: Any, shape: tuple[int, int]) -> dict[str, Pass]:
    """Return name → one pass."""
    model, ids = loaded.model, random_batch(shape).token_ids

    def eagerly(one_pass: Callable[[nn.Module, torch.Tensor, Found], None]) -> Pass:
        def measured() -> tuple[float, Found]:
            model.set_attn_implementation("eager")
            try:
                return timed(lambda found: one_pass(model, ids, found))()
            finally:
                model.set_attn_implementation("sdpa")

        return measured

    passes = {
        "bare": timed(lambda found: bare_forward(model, ids)),
        "sinkscope, 16 positions": sinkscope_pass(model, ids, POSITIONS),
        "sinkscope, all positions": sinkscope_pass(model, ids, shape[1]),
        "output_attentions": eagerly(output_attentions),
        "hooks": eagerly(hooks),
    }
    if transformer_lens is not None:
        own = copy.deepcopy(model)  # a copy, because TransformerLens changes the model's modules
        bridge = TransformerBridge.boot_transformers(
            loaded.source, hf_model=own, tokenizer=loaded.tokenizer, device="cpu"
        )
        passes["TransformerLens, run_with_hooks"] = timed(lambda found: lens_hooks(bridge, ids, found))
        passes["TransformerLens, run_with_cache"] = timed(lambda found: lens_cache(bridge, ids, found))
    too_large = KEEPS_ALL if shape[1] > 1024 else ()
    return {name: one_pass for name, one_pass in passes.items() if name not in too_large}


def print_times(passes: dict[str, Pass], rounds: int) -> None:
    found: dict[str, Found] = {}
    times: dict[str, list[float]] = {name: [] for name in passes}
    passes["bare"]()  # allocates the memory that later passes reuse
    for _ in range(rounds):
        for name, one_pass in passes.items():
            seconds, found[name] = one_pass()
            times[name].append(seconds)
    bare = times["bare"]
    print("| | lowest | ÷ bare | median ÷ bare | furthest from sinkscope |\n| --- | ---: | ---: | ---: | ---: |")
    for name, own in times.items():
        ratios = statistics.median(mine / plain for mine, plain in zip(own, bare, strict=True))
        away = furthest(found[name], found["sinkscope, 16 positions"])
        print(f"| {name} | {min(own):.2f} s | {min(own) / min(bare):.2f} | {ratios:.2f} | {away} |", flush=True)


def furthest(found: Found, reference: Found) -> str:
    """Return the largest difference from sinkscope's sink masses, norms and kurtoses, ÷ the kind's largest entry."""
    both = found.keys() & reference.keys()
    kinds = {name for _, _, name in both}
    largest = {kind: max(float(reference[key].abs().max()) for key in both if key[2] == kind) for kind in kinds}
    away = [float((found[key] - reference[key]).abs().max()) / largest[key[2]] for key in both]
    return f"{max(away):.0e}" if away else ""


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape", type=int, nargs=2, action="append")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loaded = sinkscope.models.loading.load(arguments.model)
    shapes = [tuple(shape) for shape in arguments.shape or SHAPES]
    if arguments.peak_of:
        passes_of(loaded, (1, 64))[arguments.peak_of]()  # loads the libraries
        print(peak_of(passes_of(loaded, shapes[0])[arguments.peak_of]))
        return
    lens = "not installed here: no rows of it" if transformer_lens is None else version("transformer-lens")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, TransformerLens {lens}")
    for one_pass in passes_of(loaded, (1, 64)).values():
        one_pass()  # loads the libraries
    for shape in shapes:
        print(f"\n{shape[0]} × {shape[1]} tokens, one thread")
        passes = passes_of(loaded, shape)
        print_times(passes, arguments.rounds or SHAPES.get(shape, 1))
        if arguments.no_memory:
            continue
        print("\n| | peak | ÷ bare |\n| --- | ---: | ---: |")
        model, bare = [arguments.model] if arguments.model else [], None
        for name in passes:
            peak = numbers_of(__file__, *model, "--peak-of", name, "--shape", *shape)[-1]
            bare = bare or peak
            print(f"| {name} | {peak:.0f} MB | {peak / bare:.1f} |", flush=True)


if __name__ == "__main__":
    main()
