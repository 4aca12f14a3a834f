"""Claims of StreamingLLM and of Massive Activations (Sun et al. 2024), as in the notes on both (S2M)."""

from functools import partial
from math import inf

import numpy as np
import pandas as pd

from sinkscope.commands.claims.arms import breaks, perplexity_ratio
from sinkscope.commands.claims.claim import Claim, Part, of_run, run_claim
from sinkscope.commands.claims.evidence import MAIN, Evidence, Need
from sinkscope.commands.claims.over_seeds import metric, of_one, study_claim
from sinkscope.commands.claims.scopes import causal, requires, varied_first_token
from sinkscope.commands.claims.studies import PLAIN
from sinkscope.measuring.estimates import RUN_CLAIMS
from sinkscope.results.findings import FEWEST_QUERIES, HARM
from sinkscope.results.judgment import NotDefined, above, at_least, at_most, below, between
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import Estimate, bootstrap, positive_jackknife, resamplings_of, weighted_means

BIASES = "key-bias:value=learned"
DELIMITERS = set(".,;:!?\n\r")  # characters of a delimiter token, apart from spaces


# --- streaming

STREAMING = Need("streaming")
NEAR_DENSE = 1.1  # × the dense perplexity: kept tokens that stay below suffice


def _perplexities(evidence: Evidence, keep: int | None) -> np.ndarray:
    """(1 + N,): smallest window, `keep` first tokens (None: dense), over all texts and without each text."""
    table = evidence.sequences(STREAMING).table("streaming_by_sequence")
    rows = table[table["method"] == "dense"]
    if keep is not None:
        window = table[table["window"] > 0]["window"].min()
        rows = table[(table["window"] == window) & (table["keep"] == keep) & (table["method"] != "dense")]
    if rows.empty:
        raise Lacks(f"no stream kept {keep} first tokens: streaming-window:window=64,keep={keep} has it")
    loss = rows.sort_values("sequence")["loss"].to_numpy(float)
    without = (loss.sum() - loss) / max(len(loss) - 1, 1)
    return np.exp([loss.mean(), *without])


def _streamed_ratio(keep: int, against: int | None, evidence: Evidence) -> Estimate:
    return positive_jackknife(_perplexities(evidence, keep) / _perplexities(evidence, against))


def _suffices(keep: int, against: int | None, evidence: Evidence) -> Estimate:
    """Return a ratio of perplexities; raise NotDefined if the bare window suffices, so that nothing has to be kept."""
    bare = _streamed_ratio(0, None, evidence).value
    if bare < NEAR_DENSE:
        raise NotDefined(f"a window without kept tokens suffices: its perplexity is {bare:.3g} × the dense one")
    return _streamed_ratio(keep, against, evidence)


def _register_count(run: RunData) -> int:
    return int(run.manifest["model"].get("registers") or 0)


def _registers_alone(evidence: Evidence) -> Estimate:
    count = _register_count(evidence.any_run)
    return _suffices(count, count + 3, evidence).over(f"{count} register token{'s' * (count > 1)}")


# --- massive activations


HAS_MASSIVE = of_run(RUN_CLAIMS["S-6"].parts[1], quantity="massive activations per sequence", is_evidence=False)


def massive_entries(run: Sequences) -> pd.DataFrame:
    massive = run.table("massive").query("is_massive")
    if massive.empty:
        raise NotDefined("no entry is a massive activation")
    return massive


def coordinates_of_largest(run: Sequences) -> pd.Series:
    """Return the coordinate of the largest massive activation of each sequence that has one."""
    massive = massive_entries(run)
    largest = massive.loc[massive.groupby("sequence")["value"].apply(lambda x: x.abs().idxmax())]
    return largest.set_index("sequence")["coordinate"]


def _largest_entries(evidence: Evidence, column: str) -> np.ndarray:
    """(R, layers): the largest entry of the output of each layer in `column`, mean over sequences."""
    table = evidence.natural.table("massive")
    return _means(evidence, table[column].abs().groupby([table["sequence"], table["layer"]]).max().unstack())


def _means(evidence: Evidence, by_sequence: pd.DataFrame | pd.Series) -> np.ndarray:
    weights = resamplings_of(evidence.natural.run.text_numbers[by_sequence.index])
    return weighted_means(by_sequence.to_numpy(float), weights)


def _largest_step(evidence: Evidence) -> Estimate:
    largest = _largest_entries(evidence, "value")
    if largest.shape[1] < 2:
        raise NotDefined("it has one layer")
    return bootstrap((largest[:, 1:] / largest[:, :-1]).max(1))


def _fixed_coordinate(evidence: Evidence) -> Estimate:
    coordinates = coordinates_of_largest(evidence.natural)
    usual = coordinates.mode().iloc[0]
    return bootstrap(_means(evidence, coordinates == usual)).over(f"coordinate {usual}")


def _at_first_or_delimiter(evidence: Evidence) -> Estimate:
    massive = massive_entries(evidence.natural)
    characters = massive["token"].map(lambda token: set(str(token).strip(" ▁Ġ")))
    there = (massive["position"] == 0) | characters.map(lambda some: bool(some) and some <= DELIMITERS)
    means = _means(evidence, pd.DataFrame({"there": there, "all": 1}).groupby(massive["sequence"]).sum())
    return bootstrap(means[:, 0] / means[:, 1])


def _attracts(evidence: Evidence) -> Estimate:
    """Return P(sink | massive input) ÷ P(sink), over all layers except the first.

    Positions are those that have enough queries in all sequences.
    """
    massive, sinks = massive_entries(evidence.natural), evidence.natural.table("sink_positions")
    run = evidence.natural.run
    count, shortest = run.manifest["input"]["sequences"], run.manifest["input"]["shortest"]
    heads = evidence.natural.table("attention_heads").groupby("layer")["head"].nunique()
    layers = heads.index[heads.index > 0]
    if shortest <= FEWEST_QUERIES or not len(layers):
        raise NotDefined("the sequences are too short, or it has one layer")
    places = massive[["layer", "sequence", "position"]].drop_duplicates()
    places = places.assign(layer=places["layer"] + 1)  # a layer's output is the next one's input
    last = shortest - FEWEST_QUERIES
    places, sinks = (each[each["layer"].isin(layers) & (each["position"] <= last)] for each in (places, sinks))
    sums = pd.DataFrame({
        "hits": sinks.merge(places, on=["layer", "sequence", "position"]).groupby("sequence").size(),
        "of": places["layer"].map(heads).groupby(places["sequence"]).sum(),
        "all_hits": sinks.groupby("sequence").size(),
    }).reindex(range(count)).fillna(0).assign(of_all=heads[layers].sum() * (last + 1))  # fmt: skip
    hits, of, all_hits, of_all = _means(evidence, sums).T
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = (hits / of) / (all_hits / of_all)
    return bootstrap(ratio).over(f"{hits[0] / of[0]:.0%} against {all_hits[0] / of_all[0]:.1%}")


def _outlier_features(evidence: Evidence) -> Estimate:
    """Return the ratio for every sequence in the layer with the largest activation."""
    # An outlier feature would be large at most tokens (Dettmers et al. 2022).
    massive = massive_entries(evidence.natural)
    layer = massive.loc[massive["ratio"].idxmax(), "layer"]
    table = evidence.natural.table("massive_elsewhere")
    rows = table[table["layer"] == layer]
    note = f"layer {layer}, mostly coordinate {rows['coordinate'].mode().iloc[0]}"
    return bootstrap(_means(evidence, (rows["elsewhere"] / rows["largest"]).set_axis(rows["sequence"]))).over(note)


TO_ZERO, TO_MEAN = Need("loss-do", "zero-massive"), Need("loss-do-alone", "mean-massive")

CLAIMS = (
    Claim("S-1", "StreamingLLM", "A bare window fails.",
        (Part("perplexity with a window ÷ dense", partial(_streamed_ratio, 0, None), above(1.5)),),
        (STREAMING,), (causal,)),
    Claim("S-2", "StreamingLLM", "Four kept tokens suffice.",
        (Part("perplexity with four first tokens kept ÷ dense", partial(_suffices, 4, None), below(NEAR_DENSE)),),
        (STREAMING,), (causal,)),
    Claim("S-3", "StreamingLLM", "One or two kept tokens do not suffice.",
        (Part("perplexity with one kept ÷ with four", partial(_suffices, 1, 4), above(1.05)),
         Part("perplexity with two kept ÷ with four", partial(_suffices, 2, 4), above(1.05))), (STREAMING,), (causal,)),
    Claim("S-4", "StreamingLLM", "A sink token that was trained with the model suffices alone.",
        (Part("perplexity with the register tokens kept ÷ with three first tokens in addition", _registers_alone,
            between(0.95, 1.05)),),
        (STREAMING,), (causal, requires(_register_count, "it has no register tokens before its text"))),
    Claim("S-5", "Sun et al.", "Massive activations are huge.",
        (Part("largest entry ÷ median, mean over sequences",
            lambda e: bootstrap(_largest_entries(e, "ratio").max(1)), at_least(1e4)),)),
    run_claim("S-6", is_ours=False),
    Claim("S-7", "Sun et al.", "Massive activations appear abruptly.",
        (Part("largest entry of a layer's output ÷ of the layer before, largest step", _largest_step, at_least(10.0)),
         HAS_MASSIVE)),
    Claim("S-8", "Sun et al.", "Massive activations are gone at the end.",
        (Part("largest entry of the last layer ÷ of the layer with the largest",
            lambda e: bootstrap(_largest_entries(e, "value")[:, -1] / _largest_entries(e, "value").max(1)), below(0.5)),
         HAS_MASSIVE)),
    Claim("S-9", "Sun et al.", "Massive activations are at fixed coordinates.",
        (Part("share of sequences with the largest at one coordinate", _fixed_coordinate, at_least(0.9)),),
        scope=(varied_first_token,)),
    Claim("S-10", "Sun et al.", "Massive activations are at the first token and at delimiters.",
        (Part("share of massive activations there", _at_first_or_delimiter, at_least(0.5)),)),
    Claim("S-11", "Sun et al.", "Setting massive activations to zero breaks the model.",
        breaks(TO_ZERO, "random coordinates"), (MAIN, TO_ZERO)),
    Claim("S-12", "Sun et al.", "Setting massive activations to their mean does not.",
        (Part("perplexity ÷ before", lambda e: perplexity_ratio(e, TO_MEAN), between(1 - HARM, 1 + HARM)),),
        (MAIN, TO_MEAN), (varied_first_token,)),
    Claim("S-13", "Sun et al.", "Massive activations attract attention.",
        (Part("P(sink | massive input) ÷ P(sink)", _attracts, above(1.0)),), scope=(causal,), is_ours=False),
    Claim("S-15", "Sun et al.", "Massive activations are no outlier features: ordinary tokens do not have them.",
        (Part("median entry at the massive coordinate, other tokens ÷ the massive one, mean over sequences",
            _outlier_features, at_most(0.1)),)),
    study_claim("S-14", "Sun et al.", "Key-value biases remove massive activations.",
        Need("train", f"{PLAIN},{BIASES}"),
        ("number of massive activations", of_one(metric("massive_count"), BIASES, PLAIN, (0.0, inf),
            ("massive activation: their number", metric("massive_count"), 0.0)), at_most(0.0))),
)  # fmt: skip
