"""Findings of `analyze` are data, and their sentences have no other numbers than these data."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.every_model import tiny_of
from support.made_up_runs import gradient_tables, grid, summarized
from tiny import ragged_tokens, tiny_model, written

import sinkscope
from sinkscope import Run, retrofit_model
from sinkscope.measuring.summary import gradient_summary, uniform_gradient_ratio
from sinkscope.results.findings import SINK, Finding, Outcome
from sinkscope.results.metrics import ARM_METRICS
from sinkscope.verdict import analysis
from sinkscope.verdict.analysis import packed_source, settings
from sinkscope.verdict.at_a_glance import glances
from sinkscope.verdict.report import published_lines


def finding(run: Run, name: str) -> Finding:
    (one,) = (one for one in analysis.findings(run) if one.name == name)
    return one


EMPTY = pd.DataFrame()
ATTENTION = {"attention": EMPTY}
ENTROPY = {"attention_entropy": 1.0}


def test_w1_decides_on_a_sink_and_layers_are_named() -> None:
    sink = finding(summarized({"sink_rate": [0.0, 0.5, 0.6, 0.9]}, ENTROPY, ATTENTION), "sink")
    assert (sink.outcome, sink.threshold, sink.claim) == (Outcome.PRESENT, SINK, "W-1")
    assert sink.value == pytest.approx(50)
    assert sink.numbers["layers"] == (1, 2, 3)
    assert sink.numbers["weak_layers"] == (0,)
    weak = finding(summarized({"sink_rate": [0.49, 0.49]}, ENTROPY, ATTENTION), "sink")
    assert weak.outcome == Outcome.PRESENT
    assert weak.sentence.endswith(" In no layer do 50% of the heads.")
    run = summarized({"sink_rate": [0.0] * 9 + [0.9]}, ENTROPY, ATTENTION)
    assert finding(run, "sink").outcome == Outcome.UNDECIDED  # two texts that agree do not show what others do
    rows = run.tables["attention_by_sequence"]
    rows.loc[(rows["layer"] == 9) & (rows["sequence"] == 1), "sink_rate"] = 0.91
    one_of_ten = finding(run, "sink")
    assert one_of_ten.outcome == Outcome.ABSENT
    assert "; a sink has more than 10%. At least 50% of the heads do in layer 9" in one_of_ten.sentence


def test_a_sink_that_the_interval_does_not_decide_is_not_decided() -> None:
    run = summarized({"sink_rate": [0.1]}, ENTROPY, ATTENTION)
    rows = run.tables["attention_by_sequence"]
    rows.loc[(rows["position"] == 0) & (rows["sequence"] == 1), "sink_rate"] = 0.3
    sink = finding(run, "sink")
    assert (sink.outcome, sink.low, sink.high) == (Outcome.UNDECIDED, pytest.approx(10), pytest.approx(30))
    said = "20.0% of the heads give the first token more than 30% of their attention (95 % interval 10.0 to 30.0%)"
    assert f"is not decided: {said}; a sink has more than 10%." in sink.sentence


# tokens and window → thresholds; in the first four, uniform attention alone exceeds some of them
NEAR_UNIFORM = {
    (8, 4): (0.05, 0.3), (8, 8): (0.05, 0.3), (16, 4): (0.05, 0.3), (16, 16): (0.2, 0.22, 0.25, 0.3),
    (64, 4): (0.05, 0.3), (64, 64): (0.05, 0.08, 0.1, 0.3),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_random_weights_have_no_sink_at_any_length_window_and_threshold(name: str) -> None:
    """Logits have a standard deviation near 0.3, as in randomly initialized models of width 768."""
    model = tiny_model(name, spread=5.0)
    for (length, window), thresholds in NEAR_UNIFORM.items():
        uniform = float((1 / torch.arange(1.0, window + 1)).mean())  # the k-th query of position 0 sees k keys
        for epsilon in thresholds:
            options = {"seq_len": length, "window": window, "epsilon": epsilon, "positions": 4}
            run = sinkscope.analyze(model, input="random", num_seqs=3, observables=("attention",), **options)
            findings = {one.name: one for one in analysis.findings(run)}
            assert findings["sink"].outcome != Outcome.PRESENT, options
            assert findings["later-sinks"].outcome != Outcome.PRESENT, options
            assert run.metric("uniform_mass") == pytest.approx(uniform, rel=1e-5)
            assert findings["sink"].numbers["uniform"] == run.metric("uniform_mass")
            is_undefined = uniform > epsilon
            assert (findings["sink"].outcome == Outcome.UNDEFINED) == is_undefined
            assert np.isnan(run.metric("sink_rate")) == np.isnan(run.metric("sink_rate", 1)) == is_undefined
            assert run.tables["attention"].query("position == 0")["sink_rate"].isna().all() == is_undefined
            assert (0 in set(run.tables["sink_positions"]["position"])) <= (not is_undefined)
            assert ("sink_rate" in {one.metric for one in glances(run)}) == (not is_undefined)
            assert any("no sink rate of position 0" in notice for notice in run.manifest["notices"]) == is_undefined
            rows = run.tables["finding"].query("finding == 'sink' and number == 'value'")
            assert rows["outcome"].tolist() == [str(findings["sink"].outcome)]
            assert f"uniform attention {'alone ' * is_undefined}gives it {100 * uniform:.1f}%" in run.verdict
            assert "Value states at position 0 are" not in run.verdict


def test_a_sink_that_random_weights_may_have_is_not_decided() -> None:
    run = summarized({"sink_rate": [0.4, 0.6]}, ENTROPY, ATTENTION)
    assert finding(run, "sink").outcome == Outcome.PRESENT
    heads = run.tables["attention_heads_by_sequence"]
    heads["window_mass"] = heads["window_mass"].where(heads["window_mass"] < 0.5, 0.35)
    heads["uniform_mass"] = 0.098  # five times its odds are those of 0.352
    sink = finding(run, "sink")
    assert (sink.outcome, sink.numbers["clear"]) == (Outcome.UNDECIDED, 0.0)
    assert "but random weights may give as much" in sink.sentence


def test_sequences_that_are_too_short_have_no_sink_rate(tmp_path: Path) -> None:
    """Of 6 tokens, uniform attention gives position 0 41 %; the rate is that of the sequences of 24 alone."""
    model, epsilon = tiny_model("llama"), 0.2
    long = ragged_tokens((24, 24, 24))
    runs = [
        sinkscope.analyze(model, input=written(tmp_path / f"{len(ids)}.jsonl", ids), seq_len=24, bos="never",
            epsilon=epsilon, observables=("attention",))
        for ids in (long, [*long, *ragged_tokens((6, 6))])
    ]  # fmt: skip
    alone, both = (run.tables["attention"].query("position == 0")["sink_rate"].to_numpy() for run in runs)
    assert alone.max() > 0
    assert both == pytest.approx(alone)
    assert runs[1].metric("sink_rate") == pytest.approx(runs[0].metric("sink_rate"))
    assert "in 3 sequences long enough for it" in finding(runs[1], "sink").sentence
    uniform = sum(1 / token for token in range(1, 25)) / 24  # of the sequences that have a rate
    assert finding(runs[1], "sink").numbers["uniform"] == pytest.approx(uniform)


@pytest.mark.parametrize(
    ("drain", "outcome", "words"),
    [
        (0.1, Outcome.PRESENT, "are drained where the sink is: their norm is 0.10 of that at positions 5–15"),
        (0.8, Outcome.ABSENT, "are not drained where the sink is: their norm is 0.80"),
    ],
)
def test_a_value_drain_is_that_of_the_heads_with_a_sink(drain: float, outcome: Outcome, words: str) -> None:
    run = summarized({"sink_rate": [0.0, 0.9], "value_drain": [0.9, drain]}, ENTROPY, ATTENTION)
    value_drain = finding(run, "value-drain")
    assert (value_drain.outcome, value_drain.value, value_drain.claim) == (outcome, drain, "GS-20")
    assert words in value_drain.sentence
    assert "median over the 90 of 200 heads with a sink" in value_drain.sentence


@pytest.mark.parametrize(
    ("share", "words"),
    [(1.0, "is within proposition 4's bound in every layer"), (0.4, "only 40.0% of the weights are within it")],
)
def test_the_bound_on_repeated_tokens(share: float, words: str) -> None:
    whole = {"sink_mass": 0.2, "repeated_bound": 0.3} | ENTROPY
    equal = pd.DataFrame({"layer": [0, 0], "sequence": [0, 1], "bound_share": [1.0, share], "bound_ratio": 1.0})
    run = summarized({"sink_rate": [0.0]}, whole, ATTENTION | {"equal_tokens": equal}, condition="repeated")
    assert "Position 0 is bos, and one token is repeated after it" in finding(run, "repeated-bos").sentence
    run.manifest["input"]["token_zero"] = "repeated token"
    assert words in finding(run, "repeated-bound").sentence


@pytest.mark.parametrize(
    ("model_type", "name", "outcome"),
    [
        ("smollm3", "repeated-bound", Outcome.PRESENT),  # rotary, and one layer without positions
        ("xglm", "repeated", Outcome.PRESENT),  # sinusoidal
        ("mpt", "repeated", Outcome.ABSENT),
        ("jamba", "repeated", Outcome.UNDECIDED),  # state-space layers distinguish equal tokens
        ("gpt_oss", "repeated", Outcome.UNDECIDED),  # rotary, but a learned sink logit distinguishes equal tokens
    ],
)
def test_repeated_tokens_are_judged_by_the_models_positions(model_type: str, name: str, outcome: Outcome) -> None:
    observables = ("attention", "geometry", *["equal-tokens"] * (name == "repeated-bound"))
    options = {"num_seqs": 2, "seq_len": 16, "bos": "never", "observables": observables}
    run = sinkscope.analyze(tiny_of(model_type), input="repeated", **options)
    (repeated,) = [repeated for repeated in analysis.findings(run) if repeated.name.startswith("repeated")]
    assert (repeated.name, repeated.outcome) == (name, outcome)
    assert np.isfinite(run.metric("repeated_bound")) == (name == "repeated-bound")
    assert run.verdict


def test_published_values_are_only_of_the_same_measurement() -> None:
    config = {"seq_len": 64, "window": 64, "epsilon": 0.3}
    alike, different = (
        finding(summarized({"sink_rate": [0.7, 0.7]}, ENTROPY, ATTENTION, config=config | {"epsilon": epsilon}), "sink")
        for epsilon in (0.3, 0.2)
    )
    assert not different.published
    names = "Mistral-7B 97.49%, LLaMA2-7B 92.47%, LLaMA2-13B 91.69%, LLaMA3-8B 99.02%, GPT2-XL 77.00%†"
    assert f"(WSE table 1): {names} († from a transcription of the paper)." in published_lines(alike.published)[0]


@pytest.mark.parametrize(
    ("source", "gguf_file", "bits"),
    [
        ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", None, 4),
        ("org/repository", "model-IQ3_XXS.gguf", 3),
        ("gemma3-270m-q4-k-m.gguf", None, 4),
        ("model.F16.gguf", None, None),
    ],
)
def test_the_bits_of_a_gguf_are_stated(source: str, gguf_file: str | None, bits: int | None) -> None:
    run = summarized(model={"name": "tiny", "source": source}, config={"gguf_file": gguf_file, "seq_len": 64})
    sources = packed_source(run, "W8A8")
    assert [finding.value for finding in sources] == ([] if bits is None else [bits])
    if bits:
        assert f"quantized to {bits} bits" in sources[0].sentence
        assert "W8A8 begins from these" in sources[0].sentence
        assert "begins from" not in packed_source(run)[0].sentence
        assert sources[0].name in {finding.name for finding in settings(run)}


def sentences(run: Run) -> dict[str, str]:
    """Return name of a finding → its sentence."""
    return {finding.name: finding.sentence for finding in analysis.findings(run)}


def test_the_gradient_of_uniform_causal_attention() -> None:
    """The closed form agrees with randomly drawn upstream gradients."""
    length = 64
    drawn = np.random.default_rng(0).standard_normal((length - 1, 20_000))  # the last token predicts nothing
    weights = np.tril(np.ones((length - 1, length - 1))) / np.arange(1, length)[:, None]
    norms = np.linalg.norm(weights.T @ drawn, axis=1)
    assert uniform_gradient_ratio([length - 1]) == pytest.approx(norms[0] / norms[5:16].mean(), rel=0.03)
    assert uniform_gradient_ratio([length - 1] * 3) == pytest.approx(uniform_gradient_ratio([length - 1]))
    squares = sum(np.pad(1 / np.arange(1, count + 1) ** 2, (0, 40 - count)) for count in (40, 9, 20))
    norms = np.sqrt(np.cumsum(squares[::-1])[::-1])
    assert uniform_gradient_ratio([40, 9, 20]) == pytest.approx(norms[0] / norms[5:16].mean())


def test_the_value_gradient_of_a_scale_is_read_before_it() -> None:
    """The claim of GS §5.1 is about the raw value state; V-scale with φ = 1/2 multiplies it by one half."""
    tables = gradient_tables(layers=2)
    value = tables["gradient"].query("pathway == 'value'")
    halved = value.assign(pathway="raw_value", grad_norm=value["grad_norm"] * np.where(value["position"] == 0, 0.5, 1))
    plain = gradient_summary(tables)[1]
    tables["gradient"] = pd.concat([tables["gradient"], halved], ignore_index=True)
    per_layer, scaled = gradient_summary(tables)
    assert scaled["value_gradient_ratio"] == plain["value_gradient_ratio"]
    for name, before in (("raw_value_gradient_ratio", "value_gradient_ratio"), *[("value_over_key_gradient",) * 2]):
        assert scaled[name] == pytest.approx(plain[before] / 2)
    first = value.query("head == -1 and position == 0")["grad_norm"]
    assert per_layer["value_gradient_norm"].mean() == pytest.approx(first.mean() / 2)
    said = sentences(summarized(whole=scaled, tables=tables))
    assert said["value-gradient"].startswith(
        f"The value gradient at position 0 is {scaled['raw_value_gradient_ratio']:.1f} ×"
    )
    assert (
        f"after it, at what is attended to, the gradient is {plain['value_gradient_ratio']:.1f} ×"
        in said["gradient-behind"]
    )
    assert {"value_gradient_norm", "raw_value_gradient_ratio"} <= set(ARM_METRICS)


def entries(*rows: tuple[int, int, int, int, float]) -> pd.DataFrame:
    """Return a table `massive` of these layers, sequences, positions, coordinates and values; the median is 1."""
    table = pd.DataFrame(rows, columns=["layer", "sequence", "position", "coordinate", "value"])
    return table.assign(median=1.0, ratio=table["value"].abs(), is_massive=table["value"].abs() > 100)


def test_a_massive_coordinate_is_in_the_layers_in_which_half_of_the_sequences_have_it() -> None:
    one_sequence = [(0, 0, position, 7, 200.0) for position in range(4)]
    half = [(1, sequence, 0, 7, -900.0) for sequence in range(2)]
    everywhere = [(2, sequence, 3, 8, 400.0) for sequence in range(4)]
    run = summarized(tables={"massive": entries(*one_sequence, *half, *everywhere, (0, 1, 5, 9, 300.0))})
    run.manifest["input"]["sequences"] = 4
    by_coordinate = {
        one.numbers["coordinate"]: one for one in analysis.findings(run) if one.name == "massive-coordinate"
    }
    assert {coordinate: one.sentence.removesuffix(".") for coordinate, one in by_coordinate.items()} == {
        7: "Coordinate 7 is massive in the output of layer 1, at 4 positions",  # its largest is the largest of all
        8: "Coordinate 8 is massive in the output of layer 2, at position 3; its largest is 400",
        9: "Coordinate 9 is massive in each layer in less than 50% of the sequences, at position 5; its largest is 300",
    }


def test_the_layers_in_which_the_query_bias_sets_position_0_apart_are_named() -> None:
    gaps = grid(layer=range(4), sequence=range(2)).assign(delta_later=0.0, delta_later_std=1.0)
    gaps["delta"] = gaps["layer"].map({0: 1.0, 1: 2.1, 2: 5.0, 3: 2.0})
    gaps["delta"] += gaps["layer"].isin([1, 3]) * np.where(gaps["sequence"] == 0, 5.0, -5.0)  # the mean decides
    gaps = gaps.assign(key_alignment=0.5, key_alignment_later=0.1)
    query_bias = finding(summarized(tables={"query_bias_by_sequence": gaps}), "query-bias")
    assert (query_bias.value, query_bias.numbers["layers"]) == (0.5, (1, 2))
    assert query_bias.outcome == Outcome.MEASURED  # whether N-1 holds or not
    share = "in 50% (95 % interval 50% to 100%) of the second half of the layers"
    assert f"{share}; among all 4 layers, in layers 1–2." in query_bias.sentence


def test_without_massive_activations_the_entry_with_the_largest_ratio_is_named() -> None:
    massive = finding(summarized(tables={"massive": entries((0, 0, 0, 7, 50.0), (1, 1, 3, 8, -90.0))}), "massive")
    assert (massive.outcome, massive.value) == (Outcome.ABSENT, 90)
    assert massive.numbers == {"coordinate": 8, "layer": 1, "position": 3, "ratio": 90}


@pytest.mark.parametrize(
    ("rates", "outcome", "words"),
    [
        ([0.0, 0.5], Outcome.PRESENT, "in at least 50% of them in layer 1"),
        ([0.0, 0.01], Outcome.WEAK, "There is a weak sink outside the text"),
        ([0.0, 0.009], Outcome.ABSENT, "There is no sink outside the text"),
    ],
)
def test_the_layer_with_the_largest_rate_decides_on_a_sink_outside_the_text(
    rates: list[float], outcome: Outcome, words: str
) -> None:
    summary = {"sink_rate": [0.5, 0.5], "sink_rate_outside": rates}
    outside_sink = finding(summarized(summary, ENTROPY, ATTENTION, outside=["learned sink logits"]), "sink-outside")
    assert outside_sink.outcome == outcome
    assert words in outside_sink.sentence


@pytest.mark.parametrize(
    ("rate", "outcome", "words"),
    [(0.01, Outcome.PRESENT, "some layers still have"), (0.009, Outcome.ABSENT, "no layer has")],
)
def test_gates_of_a_models_own_leave_a_sink_if_any_layer_has_one(rate: float, outcome: Outcome, words: str) -> None:
    family = {"name": "qwen3_next", "wiring": "sequential", "positions": "rotary", "gated": True}
    gates = {"gate_first": 0.2, "gate_later": 0.6}
    run = summarized({"sink_rate": [0.0, rate]}, ENTROPY | gates, ATTENTION | {"gate": EMPTY}, family=family)
    own_gates = finding(run, "own-gates")
    assert (own_gates.value, own_gates.outcome) == (0.2, outcome)
    assert f"; {words} a sink at position 0" in own_gates.sentence


@pytest.mark.parametrize(
    ("largest", "outcome", "words"),
    [
        (32_752, Outcome.ABSENT, "no entry is more than half of that"),
        (-32_753, Outcome.WEAK, "the residual stream reaches 32,753 at the output of layer 1, more than half of that"),
        (65_504, Outcome.WEAK, "float16 is risky"),
        (-65_505, Outcome.PRESENT, "float16 overflows: it ends at 65,504, and the residual stream reaches 65,505"),
    ],
)
def test_float16_has_room_for_twice_the_largest_entry(largest: float, outcome: Outcome, words: str) -> None:
    float16 = finding(summarized(tables={"massive": entries((0, 0, 0, 7, 50.0), (1, 1, 0, 7, largest))}), "float16")
    assert (float16.outcome, float16.value) == (outcome, abs(largest))
    assert words in float16.sentence


@pytest.mark.parametrize(("largest", "outcome"), [(510.0, Outcome.ABSENT), (511.0, Outcome.PRESENT)])
def test_a_step_of_more_than_two_median_entries_is_coarse(largest: float, outcome: Outcome) -> None:
    step = finding(summarized(tables={"massive": entries((0, 0, 0, 7, -largest), (1, 1, 0, 7, 99.0))}), "8-bit-step")
    assert (step.outcome, step.value, step.numbers["layer"]) == (outcome, pytest.approx(largest / 255), 0)


@pytest.mark.parametrize(
    ("rates", "layers"), [([0.04, 0.05, 0.06, 0.02], (2,)), ([0.06, 0.1, 0.2, 0.4], (2, 3)), ([0.04] * 4, ())]
)
def test_later_sinks_are_mostly_in_layers_with_a_quarter_of_the_largest_rate(
    rates: list[float], layers: tuple[int, ...]
) -> None:
    """Rates up to 5 % are almost no sinks, and tokens with less than 1 % of the sinks are not named."""
    sinks = pd.DataFrame({"position": 3, "queries": 20, "token": [*["."] * 199, "the"]})
    sinks = sinks.assign(window_mass=0.9, uniform_mass=0.05)
    summary = {"sink_rate": [0.5] * 4, "sink_rate_later": rates}
    later_sinks = finding(summarized(summary, ENTROPY, ATTENTION | {"sink_positions": sinks}), "later-sinks")
    assert (later_sinks.outcome, later_sinks.numbers["layers"]) == (Outcome.PRESENT, layers)
    assert later_sinks.sentence.endswith("; most often at the tokens '.' (100%).")


@pytest.mark.parametrize(("longest", "outcome"), [(32, Outcome.ABSENT), (33, Outcome.PRESENT)])
def test_a_window_is_reached_by_sequences_that_are_longer(longest: int, outcome: Outcome) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    run = summarized(model={"name": "tiny", "layer_types": kinds, "sliding_window": 32})
    run.manifest["input"]["longest"] = longest
    window_finding = finding(run, "sliding-window")
    assert (window_finding.outcome, window_finding.value, window_finding.numbers["layers"]) == (outcome, 32, (0, 2))


@pytest.mark.parametrize("condition", ["natural", "repeated"])
def test_repeated_tokens_that_are_all_massive_have_no_sentence_that_denies_it(condition: str) -> None:
    """In SmolLM2, the largest entry is 24,168 at every position of a repeated sequence, and the median is 48."""
    at = {"layer": 1, "sequence": 0, "coordinate": 7, "median": 48.0, "is_massive": False}
    massive = pd.DataFrame({"position": range(3), "value": 24_168.0} | at)
    massive["ratio"] = massive["value"] / massive["median"]
    norms = {"layer": [1], "site": "layer_out", "sequence": 0, "norm": 24_500.0, "norm_smallest": 24_400.0}
    tables = {"massive": massive, "activation_by_sequence": pd.DataFrame(norms)}
    said = sentences(summarized(whole={"massive_count": 0.0}, tables=tables, condition=condition))["massive"]
    if condition == "natural":
        assert said.startswith("No entry of the residual stream is a massive activation")
        return
    assert "No entry" not in said
    assert "is 24,168 (504 × the median); there the norm of position 0 is 24,500" in said
    small = sentences(summarized(tables={"massive": massive.assign(value=0.2)}, condition=condition))["massive"]
    assert small.startswith("No entry")  # below 100 an entry is not massive, for any median
    assert " is 0.2: 504 × the median" in small.replace("0.20", "0.2")


@pytest.mark.parametrize("pathway", ["value", "key"])
def test_the_gradient_ratio_does_not_depend_on_the_positions_reported(pathway: str) -> None:
    name = f"{pathway}_gradient_ratio"
    tables = gradient_tables(positions=40)
    ratios = {}
    for positions in (8, 16, 40):
        cut = {key: table[table["position"] < positions] for key, table in tables.items()}
        per_layer, totals = gradient_summary(cut, longest=64)
        ratios[positions] = [*per_layer[name], totals[name], totals["bloat_later"]]
    assert ratios[16] == ratios[40]
    assert np.isfinite(ratios[16]).all()
    assert np.isnan(ratios[8]).all()


def test_position_0_is_a_register_where_registers_precede_the_text() -> None:
    """Position 0 is not the BOS, which follows the registers."""
    asked = {"input": "random", "num_seqs": 2, "seq_len": 12, "bos": "never", "observables": ("attention",)}
    plain, registers = tiny_model("llama"), retrofit_model(tiny_model("llama"), None, "register-tokens", count=2)
    run = sinkscope.analyze(plain, **asked)
    token = run.manifest["input"]["token_zero"]
    assert f"position 0 being {token}, in float32" in run.verdict
    said = sinkscope.analyze(registers, **asked).verdict
    assert f"position 0 being the first register token, the text's own first {token}, in float32" in said
