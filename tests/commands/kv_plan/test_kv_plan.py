"""Plans for the KV cache: sizes, splits, sinks and rankings on exact small cases, and the command on a tiny model."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from support.every_model import tiny_of
from support.ranks import on_two_ranks
from tiny import ragged_tokens, tiny_model, written
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    DynamicCache,
    MambaConfig,
)

import sinkscope
from sinkscope.attention.kernels import AttentionCall, fused_attention
from sinkscope.attention.seam import open_seam
from sinkscope.commands.kv_plan import findings as findings_of
from sinkscope.commands.kv_plan import study as studies
from sinkscope.commands.kv_plan.caches import exact_tokens, rounded_cache, rounded_pair
from sinkscope.commands.kv_plan.eviction import EVICTIONS, evicting_attention
from sinkscope.commands.kv_plan.figures import draw_kv_plan
from sinkscope.commands.kv_plan.findings import findings, plans, vllm_options
from sinkscope.commands.kv_plan.options import LEAST_KEPT
from sinkscope.commands.kv_plan.plan import (
    ALL_TOKENS,
    AS_MANY,
    COMBINED,
    COSTLIEST_SPARED,
    FIRST_AND_LAST,
    FIRST_FOUR,
    FIRST_TOKENS,
    NO_SINKS,
    PREDICTED,
    RANDOM,
    RANDOM_SPARED,
    RANKINGS,
    SERVED,
    HeadsOnText,
    Plan,
    Sizes,
    lost_output,
)
from sinkscope.commands.kv_plan.study import PlanCost, PlanStudy, check_plan_applies, number_spared
from sinkscope.commands.kv_plan.texts import PAIRS, CopiedText, predicted_sinks, questions_of
from sinkscope.errors import InputError
from sinkscope.measuring.sink_rule import SinkRule
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tables import column_names
from sinkscope.models.families import find_family
from sinkscope.models.loading import LoadedModel
from sinkscope.models.rotation import random_rotation
from sinkscope.output.run import Run
from sinkscope.quantization.grids import RowGrids
from sinkscope.results.findings import Outcome
from sinkscope.results.tables import read_table
from sinkscope.retrofits import retrofit_model
from sinkscope.text.batch import Batch

SIZES = Sizes(tokens=np.array([100, 40]), kv_heads=2, width=16, sinks=2)  # the second layer sees 40 tokens
SCORES = np.array([[0.1, 0.9], [0.5, 0.2]])
INT8, INT4 = "int8_per_token_head", "int4_per_token_head"


@pytest.mark.parametrize(
    ("budget", "share", "windows", "kept"),
    [
        (0.5, 0.0, [[33, 33], [33, 33]], 140),
        (0.5, 0.8, [[11, ALL_TOKENS], [11, 11]], 139),  # 40 tokens for three heads with two sinks
        (200 / 280, 0.5, [[31, ALL_TOKENS], [31, 31]], 199),  # the first head takes its share exactly
    ],
)
def test_memory_of_a_split(budget: float, share: float, windows: list, kept: int) -> None:
    split = SIZES.split(SCORES, budget, share)
    assert split is not None
    assert split.tolist() == windows
    assert SIZES.memory(Plan("", split, np.full((2, 2), 16))) == pytest.approx(kept / 280)
    # on 8 and 4 bits a token's keys take 5/8 and its values 3/8 of 16 bits, those of the 8 sinks all of them
    fewer = SIZES.memory(Plan("", split, np.array([[8, 4], [8, 4]])))
    assert fewer == pytest.approx((8 + (kept - 8) / 2) / 280)


@pytest.mark.parametrize(("name", "share"), [("fp8", 0.5), (INT8, 0.625), (INT4, 3 / 8)])
def test_memory_of_formats_that_are_served(name: str, share: float) -> None:
    """A token has scales of 32 bits for 16 keys and 16 values of a head, and none if its scales are those of all."""
    plan = Plan("", SIZES.dense, np.full((2, 2), SERVED[name].bits), NO_SINKS, served=name)
    assert SIZES.memory(plan) == pytest.approx(share)
    plan.bits[0] = 16
    assert SIZES.memory(plan) == pytest.approx((100 + 40 * share) / 140)


@pytest.mark.parametrize(
    ("kind", "positions"), [(PREDICTED, (0, 5)), (AS_MANY, (0, 1)), (FIRST_FOUR, (0, 1, 2, 3)), (NO_SINKS, ())]
)
def test_sinks_of_a_plan_and_their_memory(kind: str, positions: tuple[int, ...]) -> None:
    plan = Plan("", SIZES.dense // ALL_TOKENS * 10, np.full((2, 2), 16), kind)
    assert plan.sinks_of(CopiedText(np.arange(9), 1, sinks=(0, 5))) == positions
    assert SIZES.memory(plan) == pytest.approx(4 * (10 + len(positions)) / 280)


def test_windows_of_the_control_are_next_to_the_first_tokens() -> None:
    study = object.__new__(PlanStudy)
    study.sizes = SIZES
    assert study._equal_windows(0.5).tolist() == [[31, 31]] * 2  # 4 · (31 + 4) of 280 tokens


def test_whole_budget_keeps_everything() -> None:
    assert np.array_equal(SIZES.split(SCORES, 1.0, 0.0), SIZES.dense)
    assert SIZES.split(SCORES, 0.01, 0.0) is None
    assert SIZES.memory(Plan("", SIZES.dense, np.full((2, 2), 16))) == 1


def test_the_next_bit_goes_to_the_largest_loss_that_is_left() -> None:
    """One bit of the first layer's keys or values takes 98 tokens ÷ 32, and of the second's 38 ÷ 32."""
    losses = np.array([[8.0, 1.0], [2.1, 0.4]])
    fewest = SIZES.memory(Plan("", SIZES.dense, np.full((2, 2), 2)))
    assert SIZES.fitting_bits(losses, fewest - 1e-6, SIZES.dense) is None
    for bits, raises in (
        ([[2, 2], [2, 2]], 0), ([[2, 2], [3, 2]], 38), ([[4, 2], [3, 2]], 2 * 98 + 38),
        ([[5, 2], [4, 2]], 3 * 98 + 2 * 38),
    ):  # fmt: skip
        fitting = SIZES.fitting_bits(losses, fewest + raises / 32 / 140 + 1e-6, SIZES.dense)
        assert fitting is not None
        assert fitting.tolist() == bits
    assert np.array_equal(SIZES.fitting_bits(losses, 1.0, SIZES.dense), np.full((2, 2), 16))
    eight = np.full((2, 2), 8)  # is followed by 16
    budget = SIZES.memory(Plan("", SIZES.dense, eight)) + 98 / 32 / 140 + 1e-6
    assert np.array_equal(SIZES.fitting_bits(np.ones((2, 2)), budget, SIZES.dense), eight)


def rounded(keys: torch.Tensor, bits: int, sinks: tuple[int, ...], center: Any = 0.0, served: str = "") -> torch.Tensor:
    """Round the keys of one text (1,K,T,d); `center` broadcasts to (K,1,d)."""
    shift = torch.zeros(1, keys.shape[1], 1, keys.shape[3]) + center
    return rounded_cache(keys, [(served, bits)], exact_tokens(keys.device, keys.shape[2], (sinks,)), shift)


def test_rounding_spreads_large_channels_and_keeps_sinks() -> None:
    torch.manual_seed(0)
    keys = torch.randn(1, 2, 50, 32)
    keys[..., 7] += 40
    rotated = rounded(keys, 4, (0, 9))
    assert torch.equal(rotated[:, :, [0, 9]], keys[:, :, [0, 9]])
    unrotated = RowGrids(4, is_symmetric=False).snap(keys)
    assert float((rotated - keys).norm()) < 0.5 * float((unrotated - keys).norm())
    centered = rounded(keys, 4, (), keys.mean(2, keepdim=True)[0])
    assert float((centered - keys).norm()) < 0.5 * float((rotated - keys).norm())


@pytest.mark.parametrize("width", [32, 16])  # of values: rounded with the keys, or apart
def test_rows_of_many_formats_are_rounded_as_alone(width: int) -> None:
    torch.manual_seed(0)
    pair = torch.randn(4, 2, 50, 32), torch.randn(4, 2, 50, width)
    centers = [torch.randn(2, 1, x.shape[3]) for x in pair]
    sinks = ((), (0, 9), (3,), (1,))
    formats = [("", 4), (INT8, 8), ("", 16), ("", 2)], [("", 16), ("fp8", 8), ("", 3), (INT4, 4)]
    together = rounded_pair(pair, formats, exact_tokens(pair[0].device, 50, sinks), centers)
    for x, kinds, center, cache in zip(pair, formats, centers, together, strict=True):
        for row, (served, bits) in enumerate(kinds):
            alone = rounded(x[row, None], bits, sinks[row], center, served)
            torch.testing.assert_close(cache[row, None], alone)
            assert (bits == 16) == torch.equal(alone, x[row, None])


def test_formats_have_the_arithmetic_of_vllm() -> None:
    torch.manual_seed(0)
    keys = torch.randn(1, 2, 50, 32) * torch.logspace(-3, 3, 50)[:, None]
    caches = {name: rounded(keys, kind.bits, (0, 9), 5.0, name) for name, kind in SERVED.items()}
    for cache in caches.values():
        assert torch.equal(cache[:, :, [0, 9]], keys[:, :, [0, 9]])
    others = [token for token in range(50) if token not in (0, 9)]
    x = keys[:, :, others]
    assert torch.equal(caches["fp8"][:, :, others], x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    scale = x.abs().amax(-1, keepdim=True) / 127
    torch.testing.assert_close(caches[INT8][:, :, others], (x / scale).round() * scale)
    signed = random_rotation(32, 0).float()
    assert torch.equal(signed.abs(), torch.full((32, 32), 32**-0.5))  # a Hadamard matrix, with signs
    low, high = (x @ signed).aminmax(dim=-1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    expected = ((x @ signed / scale).round() + zero).clamp(0, 15) - zero
    torch.testing.assert_close(caches[INT4][:, :, others], expected * scale @ signed.T)


def test_what_an_output_loses_is_a_share_of_it() -> None:
    lost = lost_output(torch.tensor([[[[3.0, 4.0]]]]), torch.tensor([[[[3.0, 0.0]]], [[[0.0, 0.0]]]]))
    torch.testing.assert_close(lost, torch.tensor([[0.8], [1.0]]))


@pytest.mark.parametrize("registers", [0, 5])
def test_planted_retrieval_head_is_first(registers: int) -> None:
    text = CopiedText.of(np.arange(64))
    assert text.ids[64:].tolist() == list(range(1, 9))
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, registers + 72, 16) for heads in (4, 2, 2))
    for t in range(64, 72):  # head 2 attends to the token after the first occurrence of its own
        query[0, 2, registers + t] = 8 * key[0, 1, registers + text.ids[t] + 1]
    call, sinks = AttentionCall(None, 0.25), (0,)
    whole = fused_attention(query, key, value, call)
    streamed = evicting_attention(query, key, value, call, [[8, 8]], [sinks])
    read = HeadsOnText(query, key, call, *whole, *streamed, text)
    for name, kind in RANKINGS.items():
        scores = kind().score(read)
        assert scores.shape == (4,)
        if name != "output-loss":  # of all tokens, the copy's are few
            assert int(scores.argmax()) == 2, name
    tokens = torch.arange(registers + 72)
    logits = (0.25 * query @ key.repeat_interleave(2, 1).mT).masked_fill(tokens > tokens[:, None], -torch.inf)
    beyond = logits.softmax(-1) * ((tokens[:, None] - tokens >= 8) & (tokens > 0))
    expected = beyond.sum(-1).mean(-1)[0]
    torch.testing.assert_close(RANKINGS["beyond-window"]().score(read), expected, atol=1e-6, rtol=1e-4)


def subject(model: Any, sequences: list[np.ndarray]) -> Subject:
    from sinkscope.text.inputs import TokenInputs

    inputs = TokenInputs("", tuple(sequences), "", "")
    return Subject(LoadedModel(model, None, "tiny", "tiny", None, None, ()), find_family(model), inputs)


def test_late_sinks_are_predicted_by_the_rule_of_the_calibration_texts() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[5, 3] = model.get_input_embeddings().weight[6, 4] = 1e6
    measured, ids = np.full((2, 24), 7)
    measured[[0, 9]], ids[[0, 9, 17]] = 6, 5
    texts = [CopiedText(measured, 3), CopiedText(np.roll(ids, 1), 3), CopiedText(ids, 3)]
    rule, texts = predicted_sinks(subject(model, [ids]), texts, calibration=1)
    assert (rule.layer, rule.coordinates) == (0, (3,))
    assert [text.sinks for text in texts] == [(), (1, 10, 18), (0, 9, 17)]


def test_sinks_have_half_of_the_smallest_massive_activation_in_the_first_layer_of_most() -> None:
    rows = [(1, 0, 7, -90.0), (2, 0, 3, 80.0), (2, 1, 9, -60.0), (2, 2, 3, 70.0), (3, 0, 3, 10.0), (3, 1, 3, 10.0)]
    massive = pd.DataFrame(rows, columns=["layer", "sequence", "coordinate", "value"])
    rule = SinkRule.of(massive)
    assert rule == (2, (3, 9), 30.0)
    assert SinkRule.of(massive[:3]).layer == 1  # in half of the texts that the most have
    entries = pd.DataFrame([(2, 0, 3, 29.0), (2, 5, 9, -31.0), (2, 6, 8, 99.0), (1, 7, 3, 99.0)])
    assert rule.sinks(entries.set_axis(["layer", "position", "coordinate", "value"], axis=1)) == (5,)
    assert SinkRule.of(massive[:0]).sinks(entries) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, [21, 21, 21]), ({"sliding_window": 6}, [6, 6, 6]),
        ({"layer_types": ["sliding_attention", "full_attention", "chunked_attention"],
          "sliding_window": 6, "attention_chunk_size": 9}, [6, 21, 9]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sinks", [[5, 1, 1, 1], [1, 1, 1, 5]])
def test_sizes_have_the_most_sinks_and_what_a_layer_sees_before_the_copy(
    settings: dict[str, Any], tokens: list[int], sinks: list[int]
) -> None:
    model = tiny_model("llama")
    vars(model.config).update(settings)
    texts = [CopiedText(np.full(24, 7), 3, sinks=tuple(range(most))) for most in sinks]
    with open_seam(model, find_family(model)) as seams:
        study = PlanStudy(subject(model, [text.ids for text in texts]), seams, texts, 1, Console(quiet=True), 0)
    assert (study.sizes.tokens.tolist(), study.sizes.sinks) == (tokens, 5)


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        ((128, 130), {}, "these have 128 to 130 tokens"), ((127, 127), {}, "a plan needs texts of at least 128 tokens"),
        ((128, 128), {"prefix": 3}, "its tokens see later ones"),
    ],
)  # fmt: skip
def test_texts_and_models_that_have_no_plan(lengths: tuple[int, ...], settings: dict[str, Any], message: str) -> None:
    reading = subject(tiny_model("llama"), [np.full(length, 7) for length in lengths])
    with pytest.raises(InputError, match=message):
        check_plan_applies(replace(reading, family=replace(reading.family, **settings)))


SMALL: dict[str, Any] = {"seq_len": 128, "num_seqs": 2}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(3, 96, (3, 600)))
    return path


@pytest.fixture(scope="module")
def run(ids: Path) -> Run:
    options = {"input": ids, "out": ids.with_name("run"), "page": False}
    return sinkscope.kv_plan(tiny_model("llama"), budget=0.25, **options, **SMALL)


def test_command(run: Run) -> None:
    for name, table in run.tables.items():
        assert tuple(table.columns[3:]) == column_names(name)
    table = run.tables["kv_plan"].set_index(["budget", "plan"])
    at_budget = table.loc[0.25]
    np.testing.assert_allclose(table["ratio"], table["perplexity"] / table.loc[(1.0, "dense")]["perplexity"].item())
    assert (run.manifest["input"]["sequences"], len(run.manifest["kv_plan"]["sinks"])) == (2, 2)
    assert ((at_budget["memory"] <= 0.25) & (at_budget["memory"] > 0.23)).all()
    sizes = Sizes(np.full(3, 128), kv_heads=2, width=8, sinks=4)
    for name, heads in run.tables["kv_heads"].query("key_bits == 16 and value_bits == 16").groupby("plan"):
        largest = heads["window"].replace(-1, ALL_TOKENS).groupby(heads["layer"]).transform("max").to_numpy()
        shared = Plan("", largest.reshape(3, 2), np.full((3, 2), 16))
        assert at_budget.loc[name]["paged_memory"] == pytest.approx(sizes.memory(shared))
    ids = torch.tensor(np.load(run.manifest["config"]["input"])[:2, :128])
    losses = [tiny_model("llama")(text[None], labels=text[None]).loss for text in ids]
    assert table.loc[(1.0, "dense")]["loss"].item() == pytest.approx(float(sum(losses)) / 2, rel=1e-5)
    tasks = run.tables["kv_tasks"].set_index(["task", "plan"])
    assert (tasks["memory"].drop("dense", level="plan") <= 0.25).all()
    assert np.allclose(tasks.loc["copy"].loc[[*EVICTIONS]]["memory"], 0.25)
    for name in ("combined", *RANKINGS):
        assert tasks.loc["copy", name]["retrieval"] == at_budget.loc[name]["retrieval"]
    assert tasks.loc["copy"].loc[[*EVICTIONS]]["loss"].nunique() == len(EVICTIONS)
    assert not np.allclose(*(tasks.loc[task].loc[[*EVICTIONS]]["loss"] for task in PAIRS))
    whole = table.loc[1.0].query("sinks == 'none'")["loss"]
    for bits, served in (("8 bits", ["fp8", INT8]), ("4 bits", [INT4])):  # formats of as many bits are read apart
        assert whole[[bits, *served]].nunique() == 1 + len(served)
    assert "% of the memory (" in run.verdict
    assert run.manifest["kv_plan"]["documents"] == 2
    assert "The measured texts are from 2 documents, which are few for an interval." in run.verdict
    assert run.tables["kv_layers"].groupby("format", sort=False)["layer"].apply(list).to_dict() == {
        name: [0, 1, 2] for name in ("4 bits", *SERVED)
    }
    for name, heads in run.tables["kv_heads"].groupby("plan"):
        whole, row = heads["window"] == -1, at_budget.loc[name]
        assert row["whole_heads"] == whole.sum()
        assert row["window"] == (-1 if whole.all() else int(heads["window"][~whole].median()))
    assert run.folder is not None
    assert (run.folder / "figures" / "kv-plan.png").is_file()


def test_the_seed_draws_questions_and_the_last_sequences_calibrate(ids: Path) -> None:
    stopped = patch.object(PlanStudy, "tables", autospec=True, side_effect=InputError("stopped"))
    with stopped as tables, pytest.raises(InputError, match="stopped"):
        sinkscope.kv_plan(tiny_model("llama"), input=ids, seed=3, **SMALL)
    study, texts = tables.call_args.args[0], [*np.load(ids)[:, :128]]
    copies, drawn = [CopiedText.of(text) for text in texts], questions_of(texts[:2], 3)
    expected = {"copy": copies[:2], "needle": drawn[:2], "keys": drawn[2:]}
    for task, of_task in (expected | {"calibration": copies[2:]}).items():
        read = study.tasks.get(task, study.calibration)
        np.testing.assert_array_equal([one.ids for one in read], [one.ids for one in of_task])
    assert study.seed == 3


def test_each_budget_is_planned_by_its_own_scores_and_the_losses_of_plans() -> None:
    study, planned = object.__new__(PlanStudy), dict[float, tuple]()
    losses = {"4 bits": np.array([[1.0, 2.0]]), "fp8": np.array([[3.0, 4.0]])}
    scores = {budget: {"retrieval": np.full((1, 2), budget)} for budget in (0.25, 0.5)}
    vars(study).update(
        layers=[5], dense=None, console=Console(quiet=True), rows=[], sequences=[], retrievals=[], heads=[],
        calibrate=lambda *_: (scores, losses), _equal_windows=lambda budget: 100 * budget, _note=lambda *_: None,
        _plan_for=lambda budget, *of_budget: planned.update({budget: of_budget}),
        _rounded_plans=list, _served_plans=lambda _: [],
    )  # fmt: skip
    columns = study.tables(list(scores))["kv_layers"].to_dict("list")
    assert columns == {"layer": [5, 5], "format": [*losses], "key_loss": [1.0, 3.0], "value_loss": [2.0, 4.0]}
    np.testing.assert_equal(planned, {budget: (scores[budget], losses["4 bits"], 100 * budget) for budget in scores})


def changed(run: Run, name: str = "kv_plan", kv_plan: dict[str, Any] | None = None, **columns: Any) -> Run:
    """Return the run with other columns of a table, or with other entries of its manifest."""
    manifest = run.manifest | {"kv_plan": run.manifest["kv_plan"] | (kv_plan or {})}
    return Run(manifest, {**run.tables, name: run.tables[name].assign(**columns)})


def test_findings_have_the_numbers_of_their_plans(run: Run) -> None:
    count = len(run.tables["kv_plan"])
    marked = changed(run, kv_plan={"sinks": [1, 3], "sink_layer": 2, "sink_coordinates": [7]}, ratio=range(count))
    ends = {"ratio_low": [row - 0.5 for row in range(count)], "ratio_high": [row + 0.5 for row in range(count)]}
    marked = changed(marked, kept=[100.0 + row for row in range(count)], **ends)
    ratios = marked.tables["kv_plan"].set_index(["budget", "plan", "sinks"])["ratio"].sort_index()
    of_plans = findings(marked)
    for one in (one for one in of_plans if one.name == "bits"):
        of_bits = ratios[1.0, f"{one.numbers['bits']} bits"]
        kept = {"predicted sinks": one.value, "as many first": one.numbers["first"], "none": one.numbers["none"]}
        assert kept == of_bits.to_dict()
    controls, rule = (one for one in of_plans if one.name in ("controls", "sink-rule"))
    at_budget = ratios[0.25].droplevel("sinks")
    for name in ("random", "random combined"):
        draws = [f"{name} {draw}" for draw in (1, 2, 3)]
        assert controls.numbers[name] == tuple(at_budget[[draw for draw in draws if draw in at_budget]])
        assert controls.numbers[f"{name} kept"] == tuple(100 + ratio for ratio in controls.numbers[name])
        assert f"random {'heads and layers' * ('combined' in name) or 'heads'} in the" in controls.sentence
    first = at_budget[FIRST_AND_LAST]
    assert (controls.numbers["first"], controls.numbers["first_kept"]) == (first, 100 + first)
    (of_plan,) = (one for one in of_plans if one.name == "plan")
    assert (of_plan.low, of_plan.value, of_plan.high) == tuple(at_budget[COMBINED] + end for end in (-0.5, 0, 0.5))
    assert (rule.value, rule.outcome) == (3, Outcome.PRESENT)
    assert rule.sentence.endswith("at most 3 in a text.")
    paged = changed(run, paged_memory=[0.001 * row for row in range(count)])
    memory = paged.tables["kv_plan"].set_index("plan")["paged_memory"]
    plan, eviction = (one for one in findings(paged) if one.is_headline)
    assert plan.numbers["paged_memory"] == memory["combined"]
    assert f"takes {memory['combined']:.1%} where the heads of a layer share blocks" in plan.sentence
    for name in RANKINGS:
        assert eviction.numbers[f"paged_memory {name}"] == memory[name]
        assert f"({memory[name]:.1%})" in eviction.sentence


@pytest.mark.parametrize(
    ("ratio", "kept", "outcome"),
    [
        (1.02, 0.9, Outcome.CONFIRMED), (1.021, 0.9, Outcome.PARTLY), (1.02, 0.899, Outcome.PARTLY),
        (1.021, 0.899, Outcome.REFUTED),
    ],
)  # fmt: skip
def test_a_plan_is_confirmed_if_it_keeps_perplexity_and_retrieval(
    ratio: float, kept: float, outcome: Outcome, run: Run
) -> None:
    (one,) = (one for one in findings(changed(run, ratio=ratio, kept=kept)) if one.name == "plan")
    assert (one.outcome, one.value, one.numbers["kept"]) == (outcome, ratio, kept)


@pytest.mark.parametrize(
    ("ratios", "name", "skips"),
    [
        ({}, None, []), ({"fp8": 1.02, INT8: 1.0}, "fp8", []), ({INT4: 1.02, "fp8": 1.0}, INT4, []),
        ({f"{INT4}, {COSTLIEST_SPARED}": 1.02, INT4: 1.021}, INT4, ["1"]),
        ({f"{INT4}, {RANDOM_SPARED}": 1.0}, None, []),
    ],
)  # fmt: skip
def test_vllm_gets_the_least_memory_that_keeps_perplexity(
    ratios: dict[str, float], name: str | None, skips: list[str], run: Run
) -> None:
    table = run.tables["kv_plan"]
    ratio = table["plan"].map(ratios).where(table["sinks"] == NO_SINKS).fillna(9.0)
    of_losses = changed(run, "kv_layers", key_loss=[5.0, 4.0, 0.0] * 4, value_loss=[0.0, 3.0, 6.0] * 4)
    memory = table["bits"].where(~table["plan"].str.endswith(RANDOM_SPARED), 0.0)
    options = vllm_options(changed(of_losses, ratio=ratio, memory=memory))
    assert (options.get("kv_cache_dtype"), options.get("kv_cache_dtype_skip_layers", [])) == (name, skips)


def test_a_format_that_is_served_has_its_numbers_and_options(run: Run) -> None:
    count = len(run.tables["kv_plan"])
    losses = [0.0] * 3 + [1.0, 3.0, 2.0] + [5.0, 4.0, 0.0] + [0.0, 0.0, 1.0]
    of_losses = changed(run, "kv_layers", key_loss=losses, value_loss=[0.0] * 6 + [0.0, 3.0, 6.0] + [0.0] * 3)
    ends = {"ratio_low": [row - 0.5 for row in range(count)], "ratio_high": [row + 0.5 for row in range(count)]}
    marked = changed(of_losses, ratio=range(count), memory=[1000.0 + row for row in range(count)], **ends)
    rows = marked.tables["kv_plan"].set_index(["plan", "sinks"]).sort_index()
    names = {finding.name: finding for finding in findings(marked)}
    for name, layer in zip(SERVED, (1, 1, 2), strict=True):
        finding = names[name]
        settings = {"": (name, NO_SINKS), "first": (name, FIRST_FOUR)}
        settings |= {"spared": (f"{name}, {COSTLIEST_SPARED}", NO_SINKS)}
        for label, key in settings.items():
            (row,) = rows.loc[[key]].to_dict("records")
            assert row["ratio"] == (finding.numbers[label] if label else finding.value)
            assert row["memory"] == finding.numbers[f"{label} memory".strip()]
        assert finding.numbers["random"] == rows.loc[[(f"{name}, {RANDOM_SPARED}", NO_SINKS)]]["ratio"].item()
        assert finding.numbers["layers"] == (layer,)
        assert (finding.low, finding.high) == (finding.value - 0.5, finding.value + 0.5)
        assert f"`--kv-cache-dtype {name}`" in finding.sentence
        assert f"`--kv-cache-dtype-skip-layers {layer}`" in finding.sentence


def test_files_and_figure_have_the_numbers_of_the_tables(run: Run) -> None:
    content = plans(changed(run, "kv_heads", key_bits=8, value_bits=4))
    assert content["layers"] == [0, 1, 2]
    assert all(plan["bits"] == [[8, 4]] * 3 for plan in content["plans"])
    ends = {"ratio_low": 1.05, "ratio_high": 1.19, "kept_low": 1.2, "kept_high": 1.6}
    same = changed(run, ratio=1.1, kept=1.5, memory=0.2, paged_memory=0.9, **ends)  # beyond the axis of ratios
    left, right = draw_kv_plan(same).axes
    drawn = (run.tables["kv_plan"]["budget"] < 1).sum() + 6  # 8, 4 and 2 bits with predicted sinks, and three formats
    for ax, ends in ((left, [1.05, 1.19]), (right, [1.2, 1.6])):
        assert len(ax.containers) == drawn
        for bar in ax.containers:
            (segment,) = bar.lines[2][0].get_segments()
            assert segment[:, 0].tolist() == pytest.approx(ends)
    names, memory = zip(*(label.get_text().split(" (") for label in left.get_yticklabels()), strict=True)
    assert set(memory) == {"20% of the memory)"}
    kinds = {COMBINED: "*", "8 bits": "o", RANDOM: "D", FIRST_AND_LAST: "D", "fp8": "s"}
    marker = {names[round(float(bar.lines[0].get_ydata()[0]))]: bar.lines[0].get_marker() for bar in left.containers}
    assert {name: marker[name] for name in kinds} == kinds
    table = same.tables["kv_plan"]
    several = pd.concat([table, table[table["budget"] < 1].assign(budget=0.5)])
    rows = draw_kv_plan(Run(run.manifest, {"kv_plan": several})).axes[0].get_yticklabels()
    assert len(rows) == 2 * (len(names) - 6) + 6  # a row for each budget


def test_a_plan_is_named_with_what_its_heads_keep() -> None:
    plan = {"plan": COMBINED, "budget": 0.25, "whole_heads": 3, "window": 9, "bits": 4.5}
    for columns, label in (
        ({}, "combined: 3 heads whole, others last 9, 4.5 bits"),
        ({"bits": 16, "window": -1}, "combined: all heads whole"),
        ({"plan": "8 bits", "budget": 1, "sinks": AS_MANY}, "8 bits, as many first tokens in full precision"),
    ):
        assert findings_of.plan_label(SimpleNamespace(**plan | columns)) == label


def test_the_overview_has_intervals_and_few_documents_are_said(run: Run) -> None:
    ends = {"ratio_low": 1.05, "ratio_high": 1.2, "kept_low": 0.7, "kept_high": 0.9}
    row = findings_of.overview(changed(run, ratio=1.1, retrieval=0.5, guessed=0.1, kept=0.8, **ends)).iloc[0]
    assert row[["÷ dense", "retrieval", "of dense"]].tolist() == ["1.100 (1.050 to 1.200)", "50.0%", "80% (70% to 90%)"]
    for documents in (7, 8):
        of_documents = changed(run, kv_plan={"documents": documents})
        about = "".join(one.sentence for one in findings_of.report(of_documents).settings)
        assert ("which are few for an interval" in about) == (documents < findings_of.FEWEST_DOCUMENTS)


def test_retrieval_is_of_the_copy_and_guesses_are_before_it(monkeypatch: pytest.MonkeyPatch, ids: Path) -> None:
    """The logits of a model that knows only what follows prompts replace the model's."""
    read = studies.logits_on

    def knowing_the_copy(subject: Subject, batch: Batch) -> torch.Tensor:
        logits = torch.zeros_like(read(subject, batch))
        logits[:, range(127, logits.shape[1] - 1), batch.token_ids[0, 128:]] = 9.0
        return logits

    monkeypatch.setattr(studies, "logits_on", knowing_the_copy)
    run = sinkscope.kv_plan(tiny_model("llama"), input=ids, page=False, figures=(), **SMALL)
    table = run.tables["kv_plan"]
    assert (table[["retrieval", "guessed", "kept"]] == [1, 0, 1]).all(axis=None)
    assert (run.tables["kv_plan_by_sequence"]["retrieval"] == 1).all()
    tasks = run.tables["kv_tasks"]
    assert (tasks[["retrieval", "kept"]] == 1).all(axis=None)
    assert (tasks["guessed"] == 0).mean() > 0.9
    outcomes = {finding.name: finding.outcome for finding in run.findings}
    assert outcomes["plan"] == Outcome.CONFIRMED
    assert {outcomes[task] for task in ("copy", *PAIRS)} == {Outcome.MEASURED}
    lost = changed(run, kept=np.nan)
    (plan,) = (finding for finding in findings(lost) if finding.name == "plan")
    assert plan.outcome == Outcome.UNDEFINED
    assert "retrieval not defined" in plan.sentence
    assert "The dense cache retrieves less than 50%, too few to compare plans." in plan.sentence
    assert {each["kept"] for each in plans(lost)["plans"]} == {None}
    half = changed(run, "kv_tasks", retrieval=0.49)
    assert {finding.outcome for finding in findings(half) if finding.name in PAIRS} == {Outcome.UNDEFINED}
    marked = changed(run, "kv_tasks", kept=range(len(tasks)))
    for finding in findings(marked):
        if finding.name in ("copy", *PAIRS):
            expected = marked.tables["kv_tasks"].query("task == @finding.name").set_index("plan")["kept"][1:]
            assert {name: finding.numbers[name] for name in expected.index} == expected.to_dict()
            assert "`tova` " in finding.sentence
    several = pd.concat([run.tables["kv_tasks"], run.tables["kv_tasks"].assign(budget=0.5, kept=0.2, retrieval=0.1)])
    again = findings(Run(run.manifest, {**run.tables, "kv_tasks": several}))
    assert {finding.outcome for finding in again if finding.name in PAIRS} == {Outcome.MEASURED}
    assert [finding.numbers for finding in again] == [finding.numbers for finding in run.findings]


def test_a_plan_adds_the_losses_of_text_and_copy() -> None:
    study, nothing = object.__new__(PlanStudy), np.zeros(2)
    study.dense, study.calibration = Plan("", nothing, nothing), ()
    costs = [PlanCost(np.array([2.0, 4.0]), np.array([7.0, 9.0]), nothing, nothing)]
    costs += [PlanCost(np.array([1.0, 1.0]), np.array([2.0, 2.0]), nothing, nothing)]
    vars(study)["_read"] = lambda plans, texts: costs
    assert study._added(study.dense) == 2 + 6


def test_the_best_plan_of_each_ranking_and_the_best_ranking_are_taken() -> None:
    study, noted = object.__new__(PlanStudy), dict[str, Plan]()
    scores = {name: SCORES + nth for nth, name in enumerate(RANKINGS)}
    losses = np.array([[4.0, 1.0], [2.0, 3.0]])
    vars(study).update(
        sizes=SIZES, layers=[4, 5], seed=10, heads=[], calibration=(), _read=lambda *_: None,
        _added=lambda plan: (plan.name != "output-loss") + abs(plan.share - 0.5) + (plan.tokens - 0.8) ** 2,
        _evictions=lambda *_: [], dense=None, _note_tasks=lambda *_: None,
        _note=lambda budget, plans: noted.update({plan.name: plan for plan in plans}),
    )  # fmt: skip
    study._plan_for(0.5, scores, losses, SIZES.dense)
    assert {noted[name].share for name in (*RANKINGS, "combined")} == {0.5}
    assert (noted["retrieval"].tokens, noted["combined"].tokens) == (0.5, 0.8)
    rows = pd.DataFrame(study.heads).query("plan == 'combined'")
    assert rows["score"].tolist() == scores["output-loss"].ravel().tolist()
    assert rows["layer"].tolist() == [4, 4, 5, 5]
    assert rows[["key_bits", "value_bits"]].values.tolist() == noted["combined"].bits.repeat(2, axis=0).tolist()
    random = np.random.default_rng(10)
    heads, layers = (random.permutation(x.ravel()).reshape(2, 2) for x in (scores["output-loss"], losses))
    for name, plan in (("random 1", noted["output-loss"]), ("random combined 1", noted["combined"])):
        windows = SIZES.split(heads, plan.tokens, plan.share)
        assert windows is not None
        np.testing.assert_array_equal(noted[name].windows, windows)
        np.testing.assert_array_equal(noted[name].bits, SIZES.fitting_bits(layers, 0.5, windows))
    assert noted[FIRST_AND_LAST].sinks == FIRST_FOUR


def test_what_layers_lose_is_that_of_keys_and_of_values_and_centers_are_without_sinks() -> None:
    model, ids = tiny_model("llama"), np.random.default_rng(0).integers(3, 96, (3, 128))
    with torch.no_grad():
        model.get_submodule("model.layers.0.self_attn.k_proj").weight.zero_()
    texts = [CopiedText.of(ids[0]), CopiedText(ids[1], 16, sinks=(0, 5)), CopiedText(ids[2], 16)]
    values, reading, quiet = list[torch.Tensor](), subject(model, list(ids)), Console(quiet=True)
    projection = model.get_submodule("model.layers.0.self_attn.v_proj")
    projection.register_forward_hook(lambda module, args, output: values.append(output[0]))
    with open_seam(model, find_family(model)) as seams, torch.no_grad():
        study = PlanStudy(reading, seams, texts, 2, quiet, 0)
        _, of_formats = study.calibrate({}, [], {"fp8": ("fp8", 8), "4 bits": ("", 4)})
        of_each = [PlanStudy(reading, seams, [texts[0], text], 1, quiet, 0) for text in texts[1:]]
        alone = [of_text.calibrate({}, [], {"fp8": ("fp8", 8)})[1]["fp8"] for of_text in of_each]
    others = [token for token in range(128) if token not in (0, 5)]
    expected = (values[0][others].mean(0) + values[1].mean(0)).unflatten(-1, (2, -1)) / 2
    torch.testing.assert_close(study.centers[0][1][:, 0], expected)
    np.testing.assert_allclose(of_formats["fp8"], sum(alone) / 2, atol=1e-7)
    for losses in of_formats.values():
        assert losses[0, 0] == 0
        assert (losses.ravel()[1:] > 0).all()
    assert (of_formats["4 bits"].ravel()[1:] > 1.2 * of_formats["fp8"].ravel()[1:]).all()


def test_sinks_are_exact_in_plans_and_rounded_in_what_is_served() -> None:
    model, ids = tiny_model("llama"), np.random.default_rng(0).integers(3, 96, (2, 128))
    texts = [CopiedText.of(ids[0]), CopiedText(ids[1], 16, sinks=tuple(range(127)))]  # the last token is its own mean
    with open_seam(model, find_family(model)) as seams, torch.no_grad():
        study = PlanStudy(subject(model, list(ids)), seams, texts, 1, Console(quiet=True), 0)
        _, losses = study.calibrate({}, [], {"plans": ("", 2), INT4: (INT4, 4)})
    assert losses["plans"].max() < 1e-6
    assert losses[INT4].min() > 1e-3


@pytest.mark.parametrize("registers", [0, 3])
def test_plans_have_their_own_costs_in_any_order(registers: int) -> None:
    model, ids = tiny_model("llama", spread=6.0), np.random.default_rng(0).integers(3, 96, (2, 128))
    if registers:
        model = retrofit_model(model, None, "register-tokens", count=registers).requires_grad_(False)
    texts = [replace(CopiedText.of(text), sinks=(0,)) for text in ids]
    with open_seam(model, find_family(model)) as seams, torch.no_grad():
        study = PlanStudy(subject(model, list(ids)), seams, texts, 1, Console(quiet=True), 0)
        snapkv, tova, expected = study._evictions(0.25)
        plans = [tova, study._plan("", study.sizes.dense // 2**28), snapkv, study.dense, expected]
        together = study._read(plans, texts[:1])
        for plan, cost in zip(plans, together, strict=True):
            study.costs.clear()
            np.testing.assert_allclose(cost, study._read([plan], texts[:1])[0], rtol=1e-5)
        together += study._read(
            [study._plan("", study.sizes.dense, 2, sinks) for sinks in (PREDICTED, NO_SINKS)], texts[:1]
        )
    assert len({float(cost.copy_loss[0]) for cost in together}) == len(plans) + 2


def test_heads_and_layers_that_a_plan_keeps() -> None:
    """A key/value head has the score of its largest query head; the costliest layers are spared."""
    model, ids = tiny_model("llama"), np.random.default_rng(0).integers(3, 96, (2, 128))
    reads, of_heads = list[HeadsOnText](), torch.tensor([1.0, 5.0, 2.0, 0.0])
    ranking: Any = SimpleNamespace(score=lambda read: reads.append(read) or of_heads)
    with open_seam(model, find_family(model)) as seams, torch.no_grad():
        texts = [replace(CopiedText.of(text), sinks=(0, 9)) for text in ids]
        study = PlanStudy(subject(model, list(ids)), seams, texts, 1, Console(quiet=True), 1)
        scores, _ = study.calibrate({"ranking": ranking}, [0.25], {})
    assert scores[0.25]["ranking"].tolist() == [[5.0, 2.0]] * 3
    for read in reads:  # an eighth of 128 tokens, and sinks
        _, expected = evicting_attention(read.query, read.key, read.key, read.call, [[16, 16]], [(0, 9)])
        torch.testing.assert_close(read.streamed_lse, expected)
    drawn = np.random.default_rng(1).permutation(3)[0]
    assert [number_spared(layers) for layers in (3, 17, 30)] == [1, 2, 3]
    losses = {name: np.roll(np.array([[0.2, 0.1], [0.1, 0.5], [0.3, 0.1]]), at, 0) for at, name in enumerate(SERVED)}
    plans = {plan.name: plan for plan in study._served_plans(losses)}
    for at, (name, kind) in enumerate(SERVED.items()):
        bits = plans[f"{name}, {COSTLIEST_SPARED}"].bits
        assert bits.tolist() == [[16 if layer == (1 + at) % 3 else kind.bits] * 2 for layer in range(3)]
        random = plans[f"{name}, {RANDOM_SPARED}"].bits
        assert random.tolist() == [[16 if layer == drawn else kind.bits] * 2 for layer in range(3)]
        assert plans[name].served == name


def hiding_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attend from one token as kvpress does: keys of `masked_key_indices` get no attention, except from a prompt."""
    seen = torch.ones(*key.shape[:3], dtype=torch.bool)
    if key.shape[2] > 1:
        seen[module.masked_key_indices] = False
    group = query.shape[1] // key.shape[1]
    key, value, seen = (x.repeat_interleave(group, 1) for x in (key, value, seen))
    return scaled_dot_product_attention(query, key, value, seen[:, :, None]).transpose(1, 2), None


@torch.no_grad()
@pytest.mark.parametrize("token", [None, 5])
def test_press_and_table_measure_one_condition(
    token: int | None, run: Run, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that are read token by token with the file for kvpress have the losses of the table, also with sinks of a
    massive activation.
    """
    monkeypatch.setitem(sys.modules, "kvpress", ModuleType("kvpress"))
    monkeypatch.setattr(sys.modules["kvpress"], "BasePress", object, raising=False)
    model = tiny_model("llama", dtype=torch.float64, spread=6.0)
    if token is not None:
        model.get_input_embeddings().weight[token, 3] = 1e6
    options: dict[str, Any] = {"input": ids, "out": tmp_path, "page": False, "figures": (), "overwrite": True}
    of_model = sinkscope.kv_plan(model, budget=0.5, **options, **SMALL)
    assert (of_model.manifest["kv_plan"]["sink_layer"] < 0) == (token is None)
    assert of_model.folder is not None
    press_of = runpy.run_path(str(of_model.folder / "plan_press.py"))["PlanPress"].of
    AttentionInterface.register("hiding", hiding_attention)
    model.set_attn_implementation("hiding")
    losses = of_model.tables["kv_plan_by_sequence"].set_index(["plan", "sequence"])["loss"].to_dict()
    for plan in ("beyond-window", "retrieval"):
        press = press_of(of_model.folder / "plan.json", 0.5, plan)
        assert {type(window) for windows in press.windows for window in windows} == {int, type(None)}
        with press(model):
            for sequence, text in enumerate(torch.from_numpy(np.load(ids)[:2, :128])):
                cache = DynamicCache()
                logits = [model(one[None, None], past_key_values=cache).logits[0, 0] for one in text]
                loss = cross_entropy(torch.stack(logits[:-1]), text[1:]).item()
                assert loss == pytest.approx(losses[plan, sequence], rel=1e-6)
                assert abs(loss - losses["dense", sequence]) > 1e-3


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama", {"budget": 0}, "budget=0: it must be more than 0"),
        ("llama", {"budget": 2}, "budget=2: it must be less than 1"),
        ("mistral", {"budget": 0.1}, "budget=0.1 leaves no token for a window"),
        ("llama", {"calibration": 9}, "the input holds 3 sequences: a plan needs 9 for calibration=…, and others"),
        ("llama", {"seq_len": 250}, "beyond the model's 256 positions: take a seq_len=… of at most 228"),
        ("llama", {"seq_len": 512}, "seq_len=512 is beyond the model's 256 positions"),
        ("deepseek_v3", {}, "engines cache one latent of each token for all heads"),
        ("mamba", {}, "it has no attention"),
        ("bert", {}, "its tokens see later ones"),
        ("bloom", {}, "attention code of its own"),
    ],
)
def test_refused(model: str, options: dict[str, Any], message: str, ids: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
    made: Any = {
        "mamba": lambda: AutoModelForCausalLM.from_config(MambaConfig(**sizes)),
        "bert": lambda: BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4, intermediate_size=48)),
        "deepseek_v3": lambda: tiny_of("deepseek_v3"),
    }.get(model, lambda: tiny_model(model))
    with pytest.raises(InputError, match=message):
        sinkscope.kv_plan(made(), input=ids, **SMALL | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.039}, "budget=0.039: a plan keeps at least 5 of 128 tokens, 3.91%: take"),
        ({"budget": (0.5, 0.01)}, "budget=0.01: a plan keeps at least 5"),
        ({"seq_len": 127}, "seq_len=127: a plan needs texts of at least 128 tokens"),
    ],
)
def test_refused_before_the_model_is_loaded(options: dict[str, Any], message: str, ids: Path) -> None:
    assert LEAST_KEPT == FIRST_TOKENS + 1
    with pytest.raises(InputError, match=message):
        sinkscope.kv_plan("no/such-model", input=ids, **SMALL | options)


@pytest.mark.usefixtures("no_figures")
def test_two_processes_measure_the_same_plans(tiny: Path, tmp_path: Path) -> None:
    """Batches of several plans are shared by their text."""
    text = written(tmp_path / "ids.jsonl", ragged_tokens((128,) * 5))
    options: dict[str, Any] = {"input": text, "seq_len": 128, "calibration": 2, "budget": (0.5,), "page": False}
    one, out = sinkscope.kv_plan(tiny, **options), tmp_path / "two"
    ended = on_two_ranks(lambda: sinkscope.kv_plan(tiny, out=out, **options), tmp_path / "log")
    assert ended == [0, 0], (tmp_path / "log").read_text()[-4000:]
    assert json.loads((out / "run.json").read_text())["processes"] == 2
    for name, table in one.tables.items():
        both = read_table(out / "tables" / f"{name}.parquet")
        pd.testing.assert_frame_equal(both, table, rtol=1e-6, atol=1e-8)
