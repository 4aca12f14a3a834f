"""`claims`: a model is measured and judged, judged again from the folder, and compared with other models."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from support.figures import skip_figures
from support.made_up_runs import made_up
from support.printed_numbers import all_numbers, numbers_of, stands_in
from tiny import VOCAB, ragged_tokens, tiny_model, written

import sinkscope
from sinkscope import Run, Scorecard
from sinkscope.commands.claims.command import ClaimBench
from sinkscope.commands.claims.evidence import Need
from sinkscope.commands.claims.options import ClaimsOptions
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.routes import routes_text
from sinkscope.errors import InputError
from sinkscope.results.findings import Outcome


def only(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave only the named claims, without routes and figures."""
    for part in ("sinkscope.commands.claims.command.CLAIMS", "sinkscope.commands.claims.table.CLAIMS"):
        patch.setattr(part, {name: CLAIMS[name] for name in names})
    patch.setattr("sinkscope.commands.claims.command.ROUTE_ROLES", ())
    skip_figures(patch)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(3, VOCAB, size=(6, 64)))
    return path


@pytest.fixture(scope="module")
def counted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Scorecard, float, int]:
    """A scorecard, how often the layers read the text for it, in the mean, and how often it expected that."""
    out = tmp_path_factory.mktemp("claims") / "llama"
    loaded = tiny_model("llama", spread=1.0)
    tokens: list[int] = []
    expected: list[int] = []
    for layer in loaded.model.layers:
        layer.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[:2].numel()))
    passes = ClaimBench._passes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClaimBench, "_passes", lambda *args: expected.append(passes(*args)) or expected[-1])
        skip_figures(patch)  # drawn below for several models
        card = sinkscope.claims(loaded, input=str(text), num_seqs=6, bos="never", draws=2, out=out)
    return card, sum(tokens) / len(loaded.model.layers) / (6 * 64), 1 + sum(expected)


@pytest.fixture(scope="module")
def measured(counted: tuple[Scorecard, float, int]) -> Scorecard:
    return counted[0]


def test_an_arm_has_a_loss_or_controls_if_any_of_its_claims_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def experiment(*args: Any, without_loss: set[str], without_controls: set[str], **__: Any) -> None:
        asked.update(without_loss=without_loss, without_controls=without_controls, draws=args[3])
        raise InputError("it is not measured")

    monkeypatch.setattr("sinkscope.commands.claims.command.Experiment", experiment)
    nothing: Any = None  # a subject that is not read
    kinds = {"zero-massive": ("do", "loss-do"), "mask-sink": ("do",), "mean-massive": ("loss-do-alone",)}
    roles = [Need(kind, name) for name, of in kinds.items() for kind in of]
    with pytest.raises(InputError, match="not measured"):
        ClaimBench(nothing, ClaimsOptions(model="made"), Console(quiet=True), ()).arms(roles, draws=7)
    assert asked == {"without_loss": {"mask-sink"}, "without_controls": {"mean-massive"}, "draws": 7}


def test_other_inputs_take_the_place_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    run = SimpleNamespace(bos="with", manifest={"input": {"token_zero": "a token id"}})
    monkeypatch.setattr(ClaimBench, "_applying", lambda bench, names: list(names))
    monkeypatch.setattr(ClaimBench, "_analyzed", lambda bench, options: asked.append(options) or run)
    nothing: Any = None  # a subject that is not read
    bench = ClaimBench(nothing, ClaimsOptions(model="made", dataset="org/set"), Console(quiet=True), ())
    observables = dict.fromkeys(("natural", "random"), ("attention",))
    bench.domain([Need("domain", "code")], ("attention",))
    for source in observables:
        bench.under_policy([Need("with-bos", source)], "with", observables)
    read = [(each["input"], each["dataset"], each.get("bos")) for each in asked]
    assert read == [("code", None, None), ("natural", "org/set", "always"), ("random", None, "always")]
    with pytest.raises(InputError, match="its text is token ids"):
        bench.under_policy([Need("without-bos", "random")], "without", observables)


def test_an_arm_with_controls_reads_the_input_once_for_each() -> None:
    nothing: Any = None  # a subject that is not read
    bench = ClaimBench(nothing, ClaimsOptions(model="made", draws=4), Console(quiet=True), ())
    needs = {"zero-massive": ("do", "loss-do"), "mask-sink": ("loss-do-alone",)}
    assert bench._passes([Need(kind, name) for name, of in needs.items() for kind in of]) == (1 + 4) + 1
    assert bench._passes([Need("gradient-do", "mask-sink")]) == 1 + 2  # its own number of controls
    assert bench._passes([Need("mixing-do", "mask-sink")]) == (1 + 4) * (1 + 4)  # with four substitutions


@pytest.mark.slow
def test_the_text_is_read_as_often_as_the_tables_need(counted: tuple[Scorecard, float, int]) -> None:
    card, readings, expected = counted
    assert not card.manifest["failed"]
    assert 0.6 < readings / expected < 1.0  # arms begin at the layer that they change


@pytest.mark.slow
def test_one_model_decides_all_but_what_training_decides(measured: Scorecard) -> None:
    table = measured.table
    unmeasured = table[table["outcome"] == Outcome.NOT_MEASURED]
    assert all(CLAIMS[name].needs[0].is_study for name in unmeasured["claim"])
    reasons = table[table["outcome"] == Outcome.DOES_NOT_APPLY]["note"]
    assert (reasons.str.len() > 0).all()
    assert measured.outcome("W-1") == Outcome.INCONCLUSIVE  # few texts without a sink
    assert measured.outcome("W-3") == Outcome.DOES_NOT_APPLY  # there is no sink that could vanish
    assert measured.outcome("W-5") == Outcome.HOLDS
    effects = measured.routes.set_index("route")["effect"]  # every route is cut, also if no claim applies to the model
    assert effects["query bias"] == effects["position vector"] == effects["effective position"] == "does not apply"
    assert effects["first embedding"] == "no sink"


def test_a_base_model_has_a_null_and_rows_of_python_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "W-1", "W-2")
    rows = np.random.default_rng(0).integers(3, VOCAB, size=(4, 64)).tolist()
    card = sinkscope.claims(tiny_model("llama").model, input=[{"input_ids": row} for row in rows], nulls=1)
    roles = next(iter(card.manifest["judged"].values()))
    assert {"natural", "null", "without-bos:random"} <= roles.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_the_folder_holds_runs_that_give_the_same_scorecard_without_the_model(
    measured: Scorecard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {"without-bos-random", "without-bos-repeated", "with-bos-random", "with-bos-repeated"}
    assert {path.name for path in (measured.folder / "runs").iterdir()} >= {"natural", "null", *drawn}
    assert Scorecard.open(measured.folder).table.equals(measured.table)
    monkeypatch.chdir(measured.folder.parent)
    again = sinkscope.claims(from_=[measured.folder])
    assert again.manifest["judged"][again.models[0]]["natural"] == f"{measured.folder.name}/runs/natural"
    decided = measured.table["value"].notna()
    for column in ("value", "low", "high", "null"):
        assert again.table[decided][column].equals(measured.table[decided][column]), column
    assert list(again.table["outcome"]) == list(measured.table["outcome"])
    sinkscope.claims(from_=[measured.folder], out=tmp_path / "card")
    with pytest.raises(sinkscope.InputError, match="judged runs of other folders"):
        sinkscope.claims(from_=[tmp_path / "card"])
    compared = sinkscope.compare(measured.folder, measured)
    assert compared.models == [f"{measured.models[0]} (llama) (1)", f"{measured.models[0]} (llama) (2)"]


def test_every_number_printed_is_in_a_table(measured: Scorecard) -> None:
    """Numbers of notes are in the tables of the runs, all others in the row of the scorecard."""
    text = (measured.folder / "scorecard.md").read_text(encoding="utf-8")
    rows = measured.table[~measured.table["outcome"].isin(["not measured", "does not apply"])]
    runs = {id(run): run for own in measured.runs.values() for run in own.values()}.values()
    tables = [*(table for run in runs for table in run.tables.values()), measured.table]
    known = all_numbers(tables)
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if re.match(r"\|( [A-Z]+-\d+)? +\|", line)]
    assert len(lines) == len(rows) > 45
    for (_, _, value, null, test, _), row in zip(lines, rows.itertuples(), strict=True):
        nulls = [row.null, row.null_low, row.null_high, 100 * row.null_passes]
        own = [row.value, row.low, row.high, *nulls, row.least, row.most, 100 * row.power]
        printed = numbers_of(f"{value} {null} {test}".replace("‡", " "))
        assert printed
        assert all(stands_in(number, own) for number in printed), (row.claim, value, null, test)
        for number in numbers_of(row.note):  # others count rows of a table, as in «300 pairs» or «4 layers»
            counted = re.search(rf"\b{number.value:.0f} (pairs|layers?|heads|random|key)", row.note)
            assert counted or stands_in(number, known), row.note
    assert (measured.folder / "figures" / "scorecard.pdf").is_file()
    known = all_numbers([measured.routes])
    routes = routes_text(measured.routes).iloc[1:].to_numpy().ravel()
    printed_rates = [number for cell in routes if " → " in cell for number in numbers_of(cell)]
    assert printed_rates
    assert all(stands_in(number, known) for number in printed_rates)


def test_what_is_there_is_not_measured_again(measured: Scorecard, text: Path, capsys: pytest.CaptureFixture) -> None:
    options = {"input": str(text), "bos": "never", "num_seqs": 6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinkscope.commands.claims.command.measure", lambda *_: pytest.fail("measured again"))
        patch.setattr("sinkscope.commands.claims.command.Experiment", lambda *_: pytest.fail("measured again"))
        again = sinkscope.claims(tiny_model("llama", spread=1.0), from_=[measured.folder], draws=2, **options)
    assert again.outcome("GS-6") == measured.outcome("GS-6")
    known = [Run.open(measured.folder / "runs" / "natural")]
    with pytest.MonkeyPatch.context() as patch:
        only(patch, "W-1")
        sinkscope.claims(tiny_model("gpt2"), runs=known, quiet=False, nulls=1, **options)
    printed = capsys.readouterr().err
    assert "note: the given runs are of LlamaForCausalLM, not of GPT2LMHeadModel" in printed
    assert re.search(r"null \(2 of 2 runs; about 1 pass and \d+ s left\)", printed)


@pytest.mark.slow
def test_several_models_stand_side_by_side(measured: Scorecard, text: Path, tmp_path: Path) -> None:
    options = {"input": str(text), "bos": "never", "observables": ("attention",)}
    gpt2 = sinkscope.analyze(tiny_model("gpt2", spread=1.0), **options)
    card = sinkscope.claims(runs=[gpt2], from_=[measured.folder])
    assert list(card.by_model.columns) == sorted(card.models, key=card.models.index)
    assert len(card.models) == 2
    assert card.outcome("W-2", gpt2.model) == Outcome.NOT_MEASURED
    decided = card.table[~card.table["outcome"].isin([Outcome.DOES_NOT_APPLY, Outcome.NOT_MEASURED])]
    counts = decided.groupby("claim")["model"].nunique()
    numbers = card.markdown.split(f"### {measured.models[0]}\n")[1].split("\n###")[0]
    alone = {line.split("|")[1].strip() for line in numbers.splitlines() if line.startswith("| ")}
    assert alone - {"claim", "---", ""} == set(counts[counts == 1].index)
    alone = sinkscope.claims(runs=[gpt2], num_seqs=7)
    assert alone.outcome("GS-4") == Outcome.NOT_MEASURED
    assert alone.table.query("claim == 'GS-4'")["note"].iloc[0].endswith("lacks the table 'activation_by_sequence'")
    compared = sinkscope.compare(measured, alone, out=tmp_path / "both")
    assert isinstance(compared, Scorecard)
    pd.testing.assert_frame_equal(compared.by_model, card.by_model[compared.by_model.columns])
    written = tmp_path / "both"
    pd.testing.assert_frame_equal(pd.read_parquet(written / "tables" / "route.parquet"), compared.routes)
    assert {path.stem for path in (written / "figures").iterdir()} == {"scorecard-by-model", "routes"}
    assert compared.manifest["differing"]["num_seqs"] == {measured.models[0]: "6", gpt2.model: "7"}


def test_runs_in_memory_are_kept_once_each() -> None:
    of_a, of_b, on_disk = made_up(), made_up(), replace(made_up(), folder=Path("run"))
    one = Scorecard({}, {}, runs={"a": {"natural": of_a, "bos": of_a, "steps": on_disk}, "a (variant)": {}})
    assert one.measured == {"natural": of_a}
    two = Scorecard({}, {}, runs={**one.runs, "b": {"natural": of_b, "bos": on_disk}})
    assert two.measured == {"a-natural": of_a, "b-natural": of_b}


def test_a_folder_is_gone_on_with_by_the_same_model_text_and_options(tmp_path: Path) -> None:
    text, out, model = tmp_path / "ids.npy", tmp_path / "card", tiny_model("llama")
    np.save(text, np.random.default_rng(0).integers(3, VOCAB, size=(4, 32)))
    options = {"input": str(text), "bos": "never", "num_seqs": 4, "seq_len": 32, "nulls": 1}

    def judge(model: object, **more: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            only(patch, "W-1")
            sinkscope.claims(model, out=out, **options | more)

    judge(model)
    judge(model)
    with pytest.raises(sinkscope.InputError, match="num_seqs was 4, now 3"):
        judge(model, num_seqs=3)
    edited = tiny_model("llama")
    edited.model.layers[2].mlp.down_proj.weight.data.mul_(1.01)
    with pytest.raises(sinkscope.InputError, match="weights_sha256 was"):
        judge(edited)
    judge(edited, overwrite=True)
    np.save(text, np.random.default_rng(1).integers(3, VOCAB, size=(4, 32)))
    with pytest.raises(sinkscope.InputError, match="input_sha256 was"):
        judge(edited)


def test_arms_are_compared_with_the_model_as_it_was_analyzed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables equal those of an experiment with its own baseline, except the mean maps, which no claim reads."""
    text = written(tmp_path / "ids.jsonl", ragged_tokens((64, 40, 64, 52)))  # losses are means over tokens
    options = {"input": str(text), "bos": "never", "num_seqs": 4, "draws": 1, "epsilon": 0.13}
    only(monkeypatch, "V-24")
    do = "scale-sink-value:where=sinks"
    arms = sinkscope.claims(tiny_model("gpt2"), **options).runs["GPT2LMHeadModel"][f"loss-do:{do}"]
    alone = sinkscope.intervene(tiny_model("gpt2"), do=do, **options)
    assert set(alone.tables) - set(arms.tables) == {"arm_maps"}
    label = next(name for name in arms.manifest["arms"] if name.startswith("scale-sink-value"))
    for name, table in arms.tables.items():
        expected = alone.tables[name].replace(rf"^{next(iter(alone.manifest['arms']))}(?!:)", label, regex=True)
        own = (
            table[table["name"] == label] if name == "effect" else table[table["condition"].isin(expected["condition"])]
        )
        pd.testing.assert_frame_equal(own.reset_index(drop=True), expected, rtol=1e-6)


def test_every_null_has_weights_of_its_own(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "W-1")
    card = sinkscope.claims(tiny_model("llama"), input=text, nulls=2)
    (runs,) = card.runs.values()
    first, second = (runs[name].tables["attention"]["window_mass"] for name in ("null", "null:1"))
    assert not np.allclose(first, second)
