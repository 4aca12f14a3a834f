"""Claims of papers from 2025 and 2026 that were read as abstracts, notes or code (shared notes; not their full text):

Beyond Outliers: A Study of Optimizers Under Quantization (OQ, 2509.23500), Hidden Dynamics of Massive Activations in
Transformer Training (MD, 2508.03616), and the alignment of sinks and spikes in hybrid models (HY, 2608.12149).
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from scipy import optimize, stats

from sinkscope.commands.claims import over_seeds
from sinkscope.commands.claims.claim import Claim, Part
from sinkscope.commands.claims.evidence import MAIN, Evidence, Need, Null
from sinkscope.commands.claims.over_seeds import CORRELATION, of_study, study_claim
from sinkscope.commands.claims.scopes import causal
from sinkscope.commands.claims.studies import ClaimStudy
from sinkscope.models.family import ATTENTION
from sinkscope.results import statistics
from sinkscope.results.judgment import NotDefined, above, at_least, at_most
from sinkscope.results.metrics import LOSS_IN_W8A8
from sinkscope.results.papers import published
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Lacks, table_of_run
from sinkscope.results.statistics import Estimate, bootstrap, mean_of_runs

# --- optimizers and quantization

OPTIMIZERS = Need("factor", "optimizer")


def _cost(run: RunData) -> float:
    costs = run.manifest.get("w8a8") or {}
    if LOSS_IN_W8A8 not in costs:
        raise Lacks(f"the run of {run.condition} has no loss in W8A8")
    return float(costs[LOSS_IN_W8A8] - costs["loss"])


@of_study
def _predicts(study: ClaimStudy, metric: str) -> Estimate:
    """Return the mean over seeds of the rank correlation over optimizers of a metric and the cost of W8A8 in nats.

    Raises NotDefined if no two optimizers differ in the cost, which then nothing could predict.
    """
    seeds, levels = over_seeds.common_seeds(study), study.by_level
    outliers, costs = (
        np.array([[of(runs[seed]) for runs in levels.values()] for seed in seeds])
        for of in (lambda run: run.metric(metric), _cost)
    )
    order = costs.mean(0).argsort()
    spread = mean_of_runs(costs[:, order[-1]] - costs[:, order[0]])
    if not spread.low > 0:
        raise NotDefined(f"the optimizers do not differ in the cost of 8 bits ({spread.value:.2g} nats at most)")
    correlations = np.array([stats.spearmanr(*pair)[0] for pair in zip(outliers, costs, strict=True)])
    words = ", ".join(f"{name} {x:.3g} costs {cost:.2g}" for name, x, cost in
                      zip(levels, outliers.mean(0), costs.mean(0), strict=True))  # fmt: skip
    return over_seeds.mean_over_seeds(correlations, CORRELATION).over(f"{words} nats").against(0.0)


# --- the emergence of massive activations over the steps of a training

MEASURED_STEPS = Need("steps")
FEWEST_STEPS = 8  # for a curve with five parameters
FITTED = 0.9  # R²


def emergence(step: np.ndarray, height: float, decay: float, rate: float, shift: float, level: float) -> np.ndarray:
    """Return A e^{−λx} log x + K with x = γt + t₀: an exponentially modulated logarithm (2508.03616)."""
    x = rate * step + shift
    return height * np.exp(-decay * x) * np.log(x) + level


def fit_of_emergence(step: np.ndarray, values: np.ndarray) -> float:
    """Return R² of the best fit of `emergence` to the values (steps,), from several starts; −∞ if none converges."""
    t, size = step / step.max(), np.ptp(values)
    best = -np.inf
    for decay in (0.01, 0.3):
        for rate in (1.0, 30.0):
            start = (size, decay, rate, 1.0, values[0])
            limits = ([-np.inf, 0.0, 1e-3, 1e-3, -np.inf], [np.inf, 10.0, 1e4, 10.0, np.inf])
            try:
                fitted, _ = optimize.curve_fit(emergence, t, values, start, bounds=limits, max_nfev=300)
            except (RuntimeError, ValueError):
                continue
            error = np.square(values - emergence(t, *fitted)).sum()
            best = max(best, 1 - error / np.square(values - values.mean()).sum())
    return float(best)


def _largest_ratios(runs: Mapping[int, RunData]) -> np.ndarray:
    """Return the largest |entry| ÷ median of each layer's output by step, means over sequences, (layers, steps)."""
    by_step = [
        table_of_run(run, "massive").groupby(["layer", "sequence"])["ratio"].max().groupby("layer").mean()
        for run in runs.values()
    ]
    return np.stack([ratios.to_numpy() for ratios in by_step], axis=1)


def _follows_curve(evidence: Evidence) -> Estimate:
    """Return the mean R² over layers of the first training."""
    runs = evidence.studies[MEASURED_STEPS].steps[0]
    if len(runs) < FEWEST_STEPS:
        raise Lacks(f"a curve of five parameters needs {FEWEST_STEPS} steps or more")
    steps, ratios = np.array(list(runs), float), _largest_ratios(runs)
    ratios = ratios[ratios.max(1) > 2 * ratios[:, 0]]  # where something emerges
    if not len(ratios):
        raise NotDefined("in no layer the largest entry grows to twice its ratio at the first step")
    fits = np.array([fit_of_emergence(steps, values) for values in ratios])
    means = statistics.weighted_means(fits, statistics.resamplings(len(fits)))
    return bootstrap(means).over(f"{len(fits)} layers, {len(runs)} steps")


# --- sinks and spikes of hybrid models


def _kinds(run: RunData) -> list[str] | None:
    return run.manifest["family"].get("kinds")


def hybrid(run: RunData) -> str | None:
    kinds = _kinds(run) or []
    return None if {ATTENTION} < {*kinds} else "all its layers attend in the same way"


def _aligned(evidence: Evidence) -> Estimate:
    """Return the share of full layers before which the sink token's norm peaks; the null is that at other positions.

    A full layer counts if two or more other layers are between it and the last full one; its sink token is the position
    with most attention. Its norm is the largest of those layers' in the last of them, just before the full layer.
    """
    run, kinds = evidence.run(MAIN), _kinds(evidence.run(MAIN)) or []
    full = [layer for layer, kind in enumerate(kinds) if kind == ATTENTION]
    norms = table_of_run(run, "activation").query("site == 'layer_out'")
    norms = norms.pivot(index="layer", columns="position", values="norm_mean")
    mass = table_of_run(run, "attention").groupby(["layer", "position"])["sink_mass"].mean().unstack()
    peaks, elsewhere = [], []
    for before, layer in pairwise(full):
        if layer - before > 2:
            is_last = norms.loc[before + 1 : layer - 1].idxmax() == layer - 1  # by position
            sink = mass.loc[layer].idxmax()
            peaks.append(float(is_last[sink]))
            elsewhere.append(float(is_last.drop(sink).mean()))
    if not peaks:
        raise NotDefined("no two layers without full attention follow each other between two that have it")
    means = statistics.weighted_means(np.array(peaks), statistics.resamplings(len(peaks)))
    return bootstrap(means).over(f"{len(peaks)} full layers").against(float(np.mean(elsewhere)))


CLAIMS = (
    study_claim("OQ-1", "abstract", "Outliers do not predict the cost of 8 bits across optimizers.", OPTIMIZERS,
        ("rank correlation over optimizers of the max infinity norm and Δ loss in W8A8", _predicts("max_inf_norm"),
            at_most(0.0)),
        ("the same of the kurtosis", _predicts("kurtosis"), at_most(0.0)), set_against=Null.NONE),
    Claim("MD-1", "abstract", "Massive activations emerge along an exponentially modulated logarithm.",
        (Part("R² of the curve over steps, mean over layers in which the largest entry grows", _follows_curve,
            at_least(FITTED)),),
        (MEASURED_STEPS,), published=published("2508.03616", {"Pythia, 188 layers": 0.984}, "R²"),
        set_against=Null.SHUFFLED),
    Claim("HY-1", "code", "In hybrids, the sink's norm peaks just before each layer with full attention.",
        (Part("share of full layers before which the norm of their sink token peaks", _aligned, above(0.5)),),
        scope=(causal, hybrid)),
)  # fmt: skip
