"""Findings of `quantize`, from hand-made tables, and its file with the sites to spare."""

import inspect
import json
from dataclasses import Field, fields
from typing import Any, get_args, get_type_hints

import numpy as np
import pandas as pd
import pytest
from support.made_up_runs import run_manifest, split_table
from tiny import tiny_model

from sinkscope import Run, quantize
from sinkscope.commands.quantize import findings as quantization
from sinkscope.commands.quantize.figures import _sites_in_layers, draw_quantization_split
from sinkscope.commands.quantize.findings import (
    JSON,
    PREFIXES,
    ROTATIONS,
    SPLIT,
    _spared_sites,
    report,
    site_names,
    whole,
)
from sinkscope.commands.quantize.manifest import Quantization
from sinkscope.commands.quantize.options import QuantizeOptions
from sinkscope.commands.quantize.study import QuantizationStudy, Row
from sinkscope.models.projections import NO_LAYER
from sinkscope.quantization.formats import Precision
from sinkscope.quantization.grids import Range, Rounding
from sinkscope.quantization.settings import (
    ACTIVATIONS,
    ALL,
    ALL_LAYERS,
    ALONE,
    COSTLIEST_KEPT,
    COSTLY,
    FULL,
    KEPT,
    KV_CACHE,
    MASSIVE_KEPT,
    WEIGHTS,
)
from sinkscope.quantization.simulation import quantized
from sinkscope.quantization.sites import INPUT, KEYS, WEIGHT, Site
from sinkscope.results.findings import Finding, Outcome
from sinkscope.verdict.report import report_markdown

SETTINGS = {"full": 0.0, "all": 1.4, "weights": 0.05, "activations": 1.3, "massive-kept": 0.9}
COLUMNS = ["layer", "setting", "site", "part", "kept", "cost"]
SITES = [(2, "down_proj", "output", True, 693.0), (3, "down_proj", "output", False, 90.0)]


def run_of(costs: dict[str, float], costliest: float | None = None) -> Run:
    """Make a run on 8 sequences: costs of the whole model, a kind of site that costs 0.8, and one layer of it."""
    rows: list[tuple[Any, ...]] = [(-1, setting, "", "", "", cost) for setting, cost in costs.items()]
    rows += [(-1, "alone", "down_proj", "output", "", 0.8), (2, "alone", "down_proj", "output", "", 0.3)]
    rows += [(-1, "kept", "down_proj", "output", "", 0.6)]
    if costliest is not None:
        rows += [(-1, "costliest-kept", "", "", "layer 2 down_proj output, layer 3 down_proj output", costliest)]
    table = pd.DataFrame(rows, columns=COLUMNS).assign(sequences=8, max_inf_norm=9.0, kurtosis=3.0)
    table = table.assign(cost_low=-np.inf, cost_high=np.inf)
    table = table.assign(loss=3.0 + table["cost"], perplexity=np.exp(3.0 + table["cost"]))
    sites = pd.DataFrame(SITES, columns=["layer", "site", "part", "is_massive", "max_abs"])
    sites = sites.assign(median_abs=0.5, zeroed=0.93)
    entry = {"scheme": "static", "bits_weights": 8, "bits_activations": 8, "bits_kv_cache": 8, "kv_cache_per": None}
    entry |= {"activations_per": "tensor"}
    entry |= {"calibration": 4, "linear_layers": 2, "not_quantized": {}}
    tables = {"quantization": table, "quantization_sites": sites}
    return Run(run_manifest(command="quantize", quantization=entry), tables)


def found(run: Run, name: str) -> list[Finding]:
    return [finding for finding in quantization.findings(run) if finding.name == name]


def test_a_cost_is_found_from_its_threshold_on() -> None:
    (cost,) = found(run_of(SETTINGS), "cost")
    assert (cost.outcome, cost.threshold) == (Outcome.PRESENT, COSTLY)
    assert cost.value == pytest.approx(np.exp(1.4))
    assert cost.sentence == "Static W8A8 multiplies perplexity by 4.055."
    run = run_of(SETTINGS)
    table = run.tables["quantization"].assign(cost_low=np.log(4.0), cost_high=np.log(4.5))
    (cost,) = found(Run(run.manifest, {**run.tables, "quantization": table}), "cost")
    assert (cost.low, cost.high) == pytest.approx((4.0, 4.5))
    assert cost.sentence == "Static W8A8 multiplies perplexity by 4.055 (95 % interval 4 to 4.5)."
    run.manifest["quantization"]["not_quantized"] = {"conv": 0.02, "router": 0.01}
    assert found(run, "not-quantized")[0].value == pytest.approx(0.03)
    harmless = run_of(SETTINGS | {"all": 0.009})
    assert found(harmless, "cost")[0].outcome == Outcome.ABSENT
    assert {finding.name for finding in quantization.findings(harmless)} == {"cost", "massive-sites"}


def test_costly_kinds_and_sites_are_findings_of_their_own() -> None:
    run = run_of(SETTINGS)
    (kind,), (site,), (kept,) = (found(run, name) for name in ("kind", "site", "kept"))
    assert (kind.value, kind.numbers["kind"], kind.numbers["sequences"]) == (0.8, "down_proj output", 8)
    assert (site.value, site.numbers["layer"], site.numbers["largest"]) == (0.3, 2, 693.0)
    assert (kept.value, kept.numbers["before"]) == (0.6, 1.4)
    assert "`down_proj output` of layer 2" in site.sentence
    table = run.tables["quantization"]
    worse = table[table["setting"] == KEPT].assign(site="up_proj", cost=1.2)
    cheap = table[table["setting"] == ALONE].assign(site="up_proj", cost=0.9 * COSTLY)
    more = Run(run.manifest, {**run.tables, "quantization": pd.concat([table, worse, cheap])})
    (saved,) = found(more, "kept")
    assert (saved.value, saved.numbers["kind"]) == (0.6, "down_proj output")
    assert (found(more, "kind"), found(more, "site")) == ([kind], [site])
    longer = pd.concat([table, table[table["setting"].isin(SETTINGS)].assign(sequences=20, cost=1.1)])
    (probed,) = found(Run(run.manifest, {**run.tables, "quantization": longer}), "kept")
    assert probed.numbers["before"] == 1.4  # of the same sequences


@pytest.mark.parametrize(
    ("cost", "outcome", "words"),
    [
        (0.1, Outcome.CONFIRMED, "recovers 93% of the cost in nats"),
        (0.7, Outcome.PARTLY, "recovers 50% of the cost in nats"),
        (1.5, Outcome.ABSENT, "recovers nothing"),
    ],
)
def test_the_share_of_the_cost_that_sparing_sites_recovers(cost: float, outcome: Outcome, words: str) -> None:
    run = run_of(SETTINGS, costliest=cost)
    massive, restored = found(run, "restored")
    assert [massive.value, massive.numbers["perplexity"]] == pytest.approx([1 - 0.9 / 1.4, np.exp(3.9)])
    assert restored.outcome == outcome
    assert words in restored.sentence
    (costliest,) = found(run, "costliest")
    assert costliest.numbers == {"count": 2, "total": 2, "massive": 1, "sites": (("down_proj output", (2, 3)),)}
    assert "1 of which hold massive activations: `down_proj output` of layers 2–3" in costliest.sentence


def test_a_site_outside_the_layers_is_named_without_a_layer() -> None:
    run = run_of(SETTINGS)
    outside = pd.DataFrame({"layer": [-1], "site": ["embed"], "part": ["output"], "is_massive": [True]})
    sites = pd.concat([run.tables["quantization_sites"], outside])
    (massive,) = found(Run(run.manifest, {**run.tables, "quantization_sites": sites}), "massive-sites")
    assert massive.numbers["sites"] == (("down_proj output", (2,)), ("embed output", ()))
    assert massive.sentence == "Massive activations are in `down_proj output` of layer 2, `embed output`."


def test_a_panel_has_the_widest_of_a_layers_experts_and_no_site_outside_the_layers() -> None:
    columns = ["layer", "site", "part", "path", "max_abs"]
    rows = [(0, "up", "input", "a", 3.0), (0, "up", "input", "b", 9.0), (0, "up", "input", "c", 5.0)]
    rows += [(0, "up", "weight", "a", 99.0), (-1, "embed", "output", "embed", 99.0), (1, "up", "input", "d", 1.0)]
    run = Run(run_manifest(command="quantize"), {"quantization_sites": pd.DataFrame(rows, columns=columns)})
    assert _sites_in_layers(run)["path"].tolist() == ["b", "d"]


# --- with --prefix

SHARES = {"tokens": 0.2, "coordinates": 0.1, "both": 0.3, "prefix": 0.6}
RANDOM = {"tokens": [0.0, 0.05], "coordinates": [0.0], "prefix": [0.0] * 20}


def split_run(
    shares: dict[str, float], random: dict[str, list[float]] | None = None, cost: float = 1.0, without_cache: str = ""
) -> Run:
    plain = run_of(SETTINGS)
    entry = {"prefix": [5], "prefix_text": "a", "without_cache": without_cache, "without_rotation": "why not"}
    entry |= plain.manifest["quantization"]
    table = split_table(SHARES | shares, RANDOM | (random or {}), cost)
    return Run(plain.manifest | {"quantization": entry}, {**plain.tables, "quantization_split": table})


def split_findings(*how: Any) -> list[Finding]:
    findings = quantization.findings(split_run(*how))
    return [finding for finding in findings if finding.section in (SPLIT, PREFIXES, ROTATIONS)]


@pytest.mark.parametrize(
    ("shares", "random", "outcome", "answer"),
    [
        ({}, {}, Outcome.ABSENT, "most of it is in neither."),
        ({"tokens": 0.7, "both": 0.8}, {}, Outcome.PRESENT, "is in few tokens."),
        ({"tokens": 0.55, "both": 0.8}, {}, Outcome.PARTLY, "both together"),  # its interval begins at 0.45
        ({"tokens": 0.7, "both": 0.5}, {"tokens": [0.8]}, Outcome.UNDECIDED, "do not decide"),  # as random tokens
        ({"tokens": 0.7, "both": 0.5}, {"tokens": [0.0, 0.7]}, Outcome.UNDECIDED, "do not decide"),  # as one draw
        ({"both": 0.45}, {}, Outcome.UNDECIDED, "do not decide"),  # its interval ends at 0.55
        ({"coordinates": 0.7}, {}, Outcome.PRESENT, "is in few coordinates."),
        ({"tokens": 0.7, "coordinates": 0.7}, {}, Outcome.PRESENT, "either of them alone"),
    ],
)
def test_where_most_of_the_cost_is(
    shares: dict[str, float], random: dict[str, list[float]], outcome: Outcome, answer: str
) -> None:
    split = split_findings(shares, random)[0]
    assert (split.outcome, answer in split.sentence) == (outcome, True)
    assert "random tokens 0% to 5%" in split.sentence or "tokens" in random


@pytest.mark.parametrize(
    ("share", "random", "outcome", "words"),
    [
        (0.6, [0.0] * 20, Outcome.CONFIRMED, "helps, and more than 20 of 20 random ones"),
        (0.6, [0.0] * 19, Outcome.CONFIRMED, "helps, and more than 19 of 19 random ones"),  # 1 of 20 is as good
        (0.6, [0.7] + [0.0] * 19, Outcome.PARTLY, "random ones may help as much: 1 of 20"),
        (0.6, [0.0] * 10, Outcome.PARTLY, "0 of 10"),  # too few to tell
        (0.05, [0.0] * 20, Outcome.ABSENT, "is not shown to help"),
        (-0.3, [0.0] * 20, Outcome.ABSENT, "does not help"),
    ],
)
def test_a_prefix_against_random_ones(share: float, random: list[float], outcome: Outcome, words: str) -> None:
    _, prefix, *_ = split_findings({"prefix": share}, {"prefix": random})
    assert (prefix.outcome, words in prefix.sentence) == (outcome, True)


def test_nothing_is_split_where_nothing_is_lost() -> None:
    split, *_, rotation = split_findings({}, {}, 0.005)
    assert split.outcome == Outcome.ABSENT
    assert split.sentence.endswith("too little to split.")
    assert rotation.sentence == "The residual stream was not rotated: why not."


def test_the_split_is_drawn_with_intervals_and_the_random_controls_of_each_setting() -> None:
    run = split_run({})
    (ax,), rows = draw_quantization_split(run).axes, quantization.split_settings(run).drop(FULL)
    assert [bar.get_width() for (bar,) in ax.containers] == rows["cost"].tolist()
    *lines, _ = ax.lines  # the last one is at a cost of 0
    assert [line.get_xdata().tolist() for line in lines[::2]] == rows[["cost_low", "cost_high"]].to_numpy().tolist()
    controls = [[1 - share for share in RANDOM.get(name, [])] for name in rows.index]
    assert [line.get_xdata().tolist() for line in lines[1::2]] == controls


# --- files for other tools

SMALL: dict[str, Any] = {"input": "random", "num_seqs": 4, "seq_len": 16, "calibration": 2}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run with three bits, which has some costly sites."""
    folder = tmp_path_factory.mktemp("spared") / "run"
    return quantize(
        tiny_model("llama"),
        scheme="static",
        bits_weights=3,
        bits_activations=3,
        weights_per="channel",
        figures=(),
        out=folder,
        **SMALL,
    )


def test_experts_that_share_a_name_have_no_cost_of_their_own() -> None:
    run = run_of(SETTINGS, costliest=0.1)
    sites = run.tables["quantization_sites"].assign(path=["2.down", "3.down"])
    experts = pd.concat([sites, sites.iloc[:1].assign(path="2.other")])
    for table, costs in ((sites, [0.3, np.nan]), (experts, [np.nan] * 3)):
        spared = _spared_sites(Run(run.manifest, {**run.tables, "quantization_sites": table}))
        np.testing.assert_equal(spared["cost"].to_numpy(), costs)


def test_the_files_hold_the_sites_that_were_kept_last(written: Run) -> None:
    assert written.folder is not None
    content = json.loads((written.folder / JSON).read_text())
    kept = whole(written).loc[COSTLIEST_KEPT, "kept"].split(", ")
    sites = written.tables["quantization_sites"]
    of_kept = sites[site_names(sites).isin(kept)]
    assert {(site["module"], site["part"]) for site in content["sites"]} == set(
        zip(of_kept["path"], of_kept["part"], strict=True)
    )
    costs = [site["cost"] for site in content["sites"]]
    assert costs == sorted(costs, reverse=True)
    table = written.tables["quantization"]
    alone = table[(table["setting"] == ALONE) & (table["layer"] >= 0)]["cost"]
    assert costs[0] == pytest.approx(alone.max())
    assert content["perplexity"]["spared"] == pytest.approx(whole(written).loc[COSTLIEST_KEPT, "perplexity"])
    assert JSON in Run.open(written.folder).manifest["files"]
    assert not list(written.folder.glob("*.yaml"))  # no server runs a static scheme with quantized outputs


def test_files_of_a_prefix_whose_keys_and_values_were_not_saved_are_not_listed() -> None:
    assert list(quantization.files(split_run({}, without_cache="why not"))) == [JSON]


def test_modules_to_spare_are_linear_layers() -> None:
    parts = {"module": ["0.up", "0.attention", "0.up", "1.down"], "part": [INPUT, KEYS, WEIGHT, WEIGHT]}
    assert quantization._modules(pd.DataFrame(parts)) == ["0.up", "1.down"]


@pytest.mark.parametrize("setting", fields(Precision), ids=lambda field: field.name)
def test_a_setting_of_the_precision_has_its_option_parameter_record_and_sentence(
    written: Run, setting: Field[Any]
) -> None:
    name, record, option = setting.name, written.manifest["quantization"], QuantizeOptions.model_fields[setting.name]
    assert (option.default, option.annotation) == (setting.default, get_type_hints(Precision)[name])
    assert name in inspect.signature(quantized).parameters
    Quantization.model_validate(record)
    assert name in Quantization.model_fields, "it is recorded in run.json: sinkscope/commands/quantize/manifest.py"
    with pytest.raises(ValueError, match="Field required"):
        Quantization.model_validate({key: value for key, value in record.items() if key != name})
    base = {field.name: field.default for field in fields(Precision)} | {"kv_cache_per": "tensor"}
    literals = (option.annotation, *get_args(option.annotation))
    choices = [choice for kind in literals for choice in get_args(kind) if isinstance(choice, str)]
    choices = choices or [type(setting.default)(setting.default / 2)]

    def described(**changes: Any) -> str:
        return report_markdown(
            report(Run(written.manifest | {"quantization": record | base | changes}, written.tables))
        )

    sentences = {described(), *(described(**{name: choice}) for choice in choices)}
    assert len(sentences) == len({base[name], *choices}), "sinkscope/commands/quantize/findings.py says the setting"
    static = {"model": "m", "scheme": "static"} | base
    folders = {QuantizeOptions(**static | {name: choice}).folder() for choice in (base[name], *choices)}
    assert len(folders) == len({base[name], *choices}), "QuantizeOptions.folder names the setting"


def test_the_search_is_among_the_coarsest_sites_of_the_costliest_kinds() -> None:
    # of a kind; a single site costs this times its layer, minus 4
    costs = {"a": 0.5, "b": 2.0, "c": 1.0, "d": 0.9 * COSTLY, "embed": 3.0}
    sites = [Site(f"layers.{layer}.{kind}", INPUT, layer, kind) for kind in "abcd" for layer in range(10)]
    sites.append(Site("embed", INPUT, NO_LAYER, "embed"))
    study, rows = object.__new__(QuantizationStudy), list[Row]()

    def measure(measured: list[Row], inputs: Any) -> list[float]:
        rows.extend(measured)
        return [costs[row.site.kind] * (1 if row.layer < 0 else row.layer - 4) for row in measured if row.site]

    study.ranges = {site: Range(-1.0, 1.0, 0.5, False) for site in sites}
    study.roundings = {site: Rounding(site.layer / 10, 0.0, 0.1) for site in sites}
    study.probes = None  # type: ignore[assignment]
    vars(study)["_measure"] = measure
    costliest = study._costliest_sites()
    names = [f"{site.kind}{site.layer}" for site in costliest]
    assert names == ["b9", "b8", "b7", "b6", "embed-1", "b5"]  # embed and b are searched
    assert [row.layer for row in rows if row.setting == ALONE and row.site == sites[-1]] == [ALL_LAYERS]
    assert {row.layer for row in rows if row.layer >= 0} == set(range(2, 10))  # of ten, eight round most to zero
    kept = [row for row in rows if row.setting == KEPT]
    assert [row.site.kind for row in kept if row.site] == ["embed", "b", "c", "a"]
    assert all(len(row.ranges) == (40 if row.site == sites[-1] else 31) and row.site not in row.ranges for row in kept)


def test_the_search_on_all_texts_ends_with_its_last_choice() -> None:
    run = run_of(SETTINGS, costliest=0.7)
    more = run.tables["quantization"].iloc[[-1]].assign(kept="layer 2 down_proj output", cost=0.1)
    table = pd.concat([run.tables["quantization"], more])
    both = Run(run.manifest, {**run.tables, "quantization": table})
    assert whole(both).loc[COSTLIEST_KEPT, ["kept", "cost"]].tolist() == ["layer 2 down_proj output", 0.1]


def test_twice_as_many_sites_are_kept_until_little_of_the_cost_remains() -> None:
    sites = [Site(f"layers.{layer}.a", INPUT, layer, "a") for layer in range(20)]
    study, kept = object.__new__(QuantizationStudy), list[tuple[int, int]]()

    def measure(rows: list[Row], inputs: Any) -> list[float]:
        kept.append((len(rows[0].kept), len(inputs)))
        costliest = sites[: len(rows[0].kept)]
        assert (list(rows[0].kept), list(rows[0].ranges)) == (costliest, sites[len(costliest) :])
        return [1.0 - 0.2 * len(rows[0].kept)]

    study.ranges = {site: Range(-1.0, 1.0, 0.5, False) for site in sites}
    study.rows = [{"setting": ALL, "sequences": 5, "cost": 9.0}, {"setting": ALL, "sequences": 2, "cost": 1.0}]
    vars(study).update(probes=range(2), inputs=range(5), _measure=measure)
    study._keep_costliest(sites)
    assert kept == [(1, 2), (2, 2), (4, 2), (8, 2), (8, 5)]
    study.rows[1]["cost"] = 0.9 * COSTLY
    study._keep_costliest(sites)  # nothing has to be restored
    assert len(kept) == 5


@pytest.mark.parametrize("probes", [2, 5])
def test_parts_are_measured_on_all_texts_and_the_cost_of_probes_on_these(probes: int) -> None:
    kinds = {"weight": (WEIGHT, False), "key": (KEYS, False), "in": (INPUT, True)}
    sites = {name: Site(name, part, 0, name) for name, (part, _) in kinds.items()}
    study, measured = object.__new__(QuantizationStudy), list[tuple[str, str, int]]()

    def measure(rows: list[Row], inputs: Any) -> None:
        measured.extend((row.setting, " ".join(site.kind for site in row.ranges), len(inputs)) for row in rows)

    study.ranges = {sites[name]: Range(-1.0, 1.0, 0.5, is_massive) for name, (_, is_massive) in kinds.items()}
    vars(study).update(probes=range(probes), inputs=range(5), _measure=measure)
    study._whole_model()
    base = [(FULL, ""), (ALL, "weight key in")]
    parts = [(WEIGHTS, "weight"), (ACTIVATIONS, "key in"), (KV_CACHE, "key"), (MASSIVE_KEPT, "weight key")]
    assert measured == [(*one, 5) for one in base + parts] + [(*one, 2) for one in base if probes < 5]
