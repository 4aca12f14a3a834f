"""Time saved because arms and single sites begin at the layer that they change: `python tests/benchmarks/resumed.py`.

It is CPU time of one thread, on the demo model: runs of `intervene` with an arm and its random controls, and the sites
of single layers in `quantize`, each measured from the first layer and from the changed layer on. Both measurements must
be equal bit for bit. README.md has the results.
"""

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from rich.console import Console

from sinkscope.commands.intervene import intervene
from sinkscope.interventions import INTERVENTIONS
from sinkscope.measuring.quantization_study import Bench
from sinkscope.measuring.subject import open_subject
from sinkscope.models.loading import LoadedModel, load
from sinkscope.options.measuring import make_config
from sinkscope.output.run import Run
from sinkscope.quantization.grids import Precision

ARMS = ("zero-massive:layers=11,coordinates=247+507", "rescale-norm:layers=12")
KIND, PART = "mlp.down_proj", "output"
LAYERS = (1, 2, 8, 9, 10, 11, 28, 29)  # the layers of SmolLM2 in which most of these entries become 0

Found = TypeVar("Found")


def timed(measure: Callable[[], Found]) -> tuple[float, Found]:
    start = time.process_time()
    found = measure()
    return time.process_time() - start, found


def print_row(name: str, whole: float, resumed: float) -> None:
    print(f"| {name} | {whole:.1f} s | {resumed:.1f} s | {whole / resumed:.2f} |", flush=True)


def time_arm(loaded: LoadedModel, do: str, num_seqs: int, draws: int) -> None:
    """Time a run with the unchanged model, the arm and its controls."""

    def measure() -> Run:
        return intervene(loaded, do, draws=draws, num_seqs=num_seqs)

    kind = INTERVENTIONS[do.partition(":")[0]]
    resumed, run = timed(measure)
    begins, kind.begins_at = kind.begins_at, lambda self, target: 0  # type: ignore[method-assign]
    whole, expected = timed(measure)
    kind.begins_at = begins  # type: ignore[method-assign]
    assert all(table.equals(run.tables[name]) for name, table in expected.tables.items())
    print_row(f"`{do}`, {draws} controls", whole, resumed)


def time_sites(loaded: LoadedModel, num_seqs: int) -> None:
    config = make_config(num_seqs=num_seqs + 1)
    with open_subject(loaded, None, config, Console(quiet=True)) as subject:
        bench = Bench(subject, Precision(), batch_size=num_seqs)
        inputs, held_out = subject.inputs.part(0, num_seqs), subject.inputs.part(num_seqs, num_seqs + 1)
        ranges = bench.ranges(held_out)
        sites = [site for site in ranges if (site.kind, site.part) == (KIND, PART) and site.layer in LAYERS]
        settings = [{site: ranges[site]} for site in sites]
        whole, expected = timed(lambda: [bench.measure(setting, inputs) for setting in settings])
        resumed, found = timed(lambda: bench.measure_each(settings, inputs))
        assert found == expected
    print_row(f"{KIND} {PART} of layers {', '.join(map(str, LAYERS))}", whole, resumed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, default=16)
    parser.add_argument("--draws", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load()
    print("| measured | whole | from its layer | ratio |\n| --- | ---: | ---: | ---: |")
    time_sites(loaded, arguments.num_seqs)
    for do in ARMS:
        time_arm(loaded, do, arguments.num_seqs, arguments.draws)


if __name__ == "__main__":
    main()
