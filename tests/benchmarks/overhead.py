"""Cost of sinkscope compared with the bare model, in one process: `python tests/benchmarks/overhead.py [MODEL]`.

Without options it runs for at most five minutes on two slow cores: the rows in `QUICK`, as many rounds as fit into
`SECONDS` for each table, and peak memory for the first and the last row. `--thorough` runs seven rounds of every row,
also at the longer shapes, and the memory of every row: half an hour on such a machine. The last line is the summary.

Every variant runs once per round in turn, so that a change of the machine's speed affects all of them equally; time is
the median over rounds of each variant ÷ the bare SDPA forward of the same round. Peak memory is measured separately,
with one variant per subprocess: the high-water mark of resident memory during the pass above the resident memory before
it. On a GPU (`--device cuda`) the clock stops when the device has finished, and memory is the device's, in this
process. `--random` uses random weights, in the shape of Llama-2-7B or, for long texts (`--random small --only forward
--shape 1 32768`), of a small Llama. The bare forward is `model(input_ids)`. The forward observables compute no logits;
the row "no logits" is a bare forward that also computes none, the strictest baseline.
"""

import argparse
import statistics
import time
from collections import ChainMap
from collections.abc import Callable

import torch
from common import bare_backward, bare_forward, numbers_of, peak_of, random_batch
from transformers import LlamaConfig, LlamaForCausalLM

import sinkscope.models.loading
from sinkscope.interventions import parse
from sinkscope.measuring.observables.activation import Activation, Outlier
from sinkscope.measuring.observables.attention import Attention
from sinkscope.measuring.observables.close_ups import MeanMaps
from sinkscope.measuring.observables.geometry import Geometry
from sinkscope.measuring.observables.gradient import Gradient
from sinkscope.measuring.observables.massive import Massive
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.families import find_family

Variant = Callable[[], float]  # runs one pass and returns its seconds

FORWARD = (Attention, Geometry, Activation, Massive, Outlier)
ARMS = ("zero-key-columns:coordinates=507", "zero-massive:layers=11,coordinates=507", "scale-sink-value", "mask-sink")
ROUNDS = 7
SECONDS = 30.0  # for the rounds of one table without --thorough; at least one round runs
QUICK = (
    "bare SDPA forward", "bare SDPA forward, no logits", "attention + activation, 16 columns",
    "all forward observables, 16 columns", "all forward observables, all columns", "bare frozen forward + backward",
    "gradient observables", "arm: before", "arm: mask-sink",
)  # fmt: skip
RANDOM = {  # name → differences from Llama-2-7B's shape
    "7b": {},
    "small": {
        "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip


def finish() -> None:
    """Wait until the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(one_pass: Callable[[], object], clock: Callable[[], float]) -> float:
    finish()
    start = clock()
    one_pass()
    finish()
    return clock() - start


def variants_of(
    model,
    shape: tuple[int, int],
    clock: Callable[[], float] = time.perf_counter,
    around: Callable[[Observable], Observable] = lambda observable: observable,
) -> dict[str, dict[str, Variant]]:
    """Return kind → name → one timed pass; `around` is called with every new observable."""
    vocabulary = (100, min(30_000, model.config.get_text_config().vocab_size))
    length, batch = shape[1], random_batch(shape, vocabulary)
    ids = batch.token_ids.to(model.device)

    def bare(one_pass: Callable[[], object]) -> Variant:
        return lambda: seconds_of(one_pass, clock)

    def traced(
        one_pass: Callable[[Tracer, list], object], observables: tuple, positions: int = 16, do: tuple[str, ...] = ()
    ) -> Variant:
        """Return a pass timed inside an open tracer, which is removed afterwards so that bare passes are bare."""

        def timed() -> float:
            settings = Settings(positions=positions, window=64)
            with open_tracer(model, find_family(model), interventions=[parse(part) for part in do]) as tracer:

                def observed() -> None:
                    made = [around(observable(settings)) for observable in observables]
                    if Gradient in observables:
                        made[0].prepare(model, find_family(model), ids.numel())
                    one_pass(tracer, made)

                return seconds_of(observed, clock)

        return timed

    def analyze(*observables: type, positions: int = 16) -> Variant:
        return traced(lambda tracer, made: tracer.forward(batch, made), observables, positions)

    def gradients(*observables: type) -> Variant:
        return traced(lambda tracer, made: tracer.forward_backward(batch, made), observables)

    def arm(*do: str) -> Variant:
        """Return a pass of an arm of `intervene`: attention, massive activations, maps and the loss."""
        watched = (Attention, Massive, MeanMaps)
        return traced(lambda tracer, made: tracer.forward_with_loss(batch, made), watched, do=do)

    def output_attentions() -> None:
        model.set_attn_implementation("eager")
        model(input_ids=ids, use_cache=False, output_attentions=True, output_hidden_states=True)
        model.set_attn_implementation("sdpa")

    with_logits = {"bare SDPA forward": bare(lambda: model(input_ids=ids, use_cache=False))}
    forward = with_logits | {
        "bare SDPA forward, no logits": bare(lambda: bare_forward(model, ids)),
        "bare forward, output_attentions": bare(output_attentions),
        "seams and trace": analyze(),  # nothing is read
        "attention + activation, 16 columns": analyze(Attention, Activation),
        "all forward observables, 16 columns": analyze(*FORWARD),
    }
    if length > 64:
        forward["attention + activation, all columns"] = analyze(Attention, Activation, positions=length)
        forward["all forward observables, all columns"] = analyze(*FORWARD, positions=length)
    backward = {  # of the frozen model, with gradients from the embeddings
        "bare frozen forward + backward": bare(lambda: bare_backward(model, ids)),
        "gradient observables": gradients(Gradient),
        "gradient and all forward observables": gradients(Gradient, *FORWARD),
    }
    arms = with_logits | {"arm: before": arm()} | {f"arm: {do}": arm(do) for do in ARMS}
    return {"forward": forward, "backward": backward, "arms": arms}


def report_times(passes: dict[str, Variant], shape: tuple[int, int], rounds: int, seconds: float) -> dict[str, float]:
    """Return name → time ÷ the first variant's, after `rounds` rounds or `seconds`, but at least one round."""
    for one_pass in passes.values():  # warms up
        one_pass()
    times: dict[str, list[float]] = {name: [] for name in passes}
    start, done = time.perf_counter(), 0
    while done < rounds and (not done or (time.perf_counter() - start) * (done + 1) / done < seconds):
        for name, one_pass in passes.items():
            times[name].append(one_pass())
        done += 1
    base = next(iter(times.values()))
    print(f"\n{shape[0]} × {shape[1]} tokens: median of {done} round{'s' * (done > 1)}")
    ratios = {}
    for name, own in times.items():
        ratios[name] = statistics.median(mine / bare for mine, bare in zip(own, base, strict=True))
        print(f"  {name:<40} {1e3 * statistics.median(own):8.0f} ms   {ratios[name]:5.2f} ×", flush=True)
    return ratios


def report_memory(peak: Callable[[str], float], shape: tuple[int, int], names: list[str]) -> dict[str, float]:
    """Return name → peak memory in MB by `peak` ÷ the first variant's."""
    print(f"\n{shape[0]} × {shape[1]} tokens: peak memory above what is taken before the pass")
    peaks = {}
    for name in names:
        peaks[name] = peak(name)
        print(f"  {name:<40} {peaks[name]:8.0f} MB   {peaks[name] / peaks[names[0]]:5.2f} ×", flush=True)
    return {name: peak / peaks[names[0]] for name, peak in peaks.items()}


def device_peak(one_pass: Variant) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one_pass()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def resident_peak(arguments: argparse.Namespace, shape: tuple[int, int], name: str) -> float:
    model = ("--random", arguments.random) if arguments.random else [arguments.model] * bool(arguments.model)
    return numbers_of(__file__, "--peak-of", name, "--shape", *shape, *model)[-1]


SHAPES = {  # kind of variants → shapes, and shapes of --thorough
    "forward": (((8, 64), (1, 1024)), ((8, 64), (1, 2048))),
    "backward": (((8, 64),), ((8, 64), (1, 1024))),
    "arms": (((8, 64),), ((8, 64), (1, 2048))),
}


def the_model(arguments: argparse.Namespace):
    if not arguments.random:
        where = {"device_map": arguments.device, "dtype": arguments.dtype}
        return sinkscope.models.loading.load(arguments.model, **where).model
    with torch.device(arguments.device or "cpu"):
        model = LlamaForCausalLM._from_config(
            LlamaConfig(**RANDOM[arguments.random]), dtype=getattr(torch, arguments.dtype or "float32")
        )
    return model.eval().requires_grad_(False)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--thorough", action="store_true", help="every row, longer shapes, seven rounds")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--shape", type=int, nargs=2)
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--device", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--random", choices=RANDOM, help="the shape of a model with random weights")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = the_model(arguments)
    if arguments.peak_of:
        name = arguments.peak_of
        short, own = (ChainMap(*variants_of(model, shape).values()) for shape in ((1, 64), tuple(arguments.shape)))
        short[name.replace("all columns", "16 columns")]()  # loads the libraries
        print(peak_of(own[name]))
        return
    where = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "CPU"
    print(
        f"torch {torch.__version__}, {where}, {model.dtype}, {torch.get_num_threads()} threads, "
        f"{model.config._attn_implementation}"
    )
    reports = []
    for kind in [arguments.only] if arguments.only else SHAPES:
        for shape in (tuple(arguments.shape),) if arguments.shape else SHAPES[kind][arguments.thorough]:
            reports.append(report(model, arguments, variants_of(model, shape)[kind], shape))
    print(f"\nsummary (÷ the bare pass): {'; '.join(reports)}")


def report(model, arguments: argparse.Namespace, passes: dict[str, Variant], shape: tuple[int, int]) -> str:
    """Print the tables of one kind and shape; return the last row in the words of the summary."""
    if not arguments.thorough:
        passes = {name: one_pass for name, one_pass in passes.items() if name in QUICK}
    seconds = float("inf") if arguments.thorough else SECONDS
    times = report_times(passes, shape, arguments.rounds, seconds)
    names = list(passes)
    last = names[-1]
    shown = names if arguments.thorough else [names[0], last]
    on_gpu = model.device.type == "cuda"
    memory = report_memory(
        lambda name: device_peak(passes[name]) if on_gpu else resident_peak(arguments, shape, name), shape, shown
    )
    return f"{last} at {shape[0]} × {shape[1]}: {times[last]:.2f} × time, {memory[last]:.2f} × memory"


if __name__ == "__main__":
    main()
