"""`card`: model cards that the hub's own parser reads, and a dataset that is uploaded and read back."""

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hub import Hub, Repo
from huggingface_hub import ModelCard, metadata_load, snapshot_download
from huggingface_hub.repocard_data import model_index_to_eval_results
from support.figures import quick_sweeps
from support.made_up_runs import made_up, save
from support.retrofit_command import command_line

import sinkscope
from sinkscope import InputError, Run, SinkscopeError
from sinkscope.commands.card.command import upload
from sinkscope.commands.card.output import Card, _results_of_run, _rounded
from sinkscope.commands.card.tables import values_of
from sinkscope.commands.claims.scorecard import Scorecard
from sinkscope.commands.claims.table import NOT_JUDGED
from sinkscope.options.option import as_folder_name
from sinkscope.results.manifest import make_manifest, write_manifest
from sinkscope.results.metrics import HEADLINE_METRICS, METRICS
from sinkscope.results.tables import write_tables

REPORTS = Path(__file__).parents[3] / "reports"
MODELS = ("smollm2-135m", "gemma3-270m", "mgm")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Card:
    return sinkscope.card(*(REPORTS / name for name in MODELS), out=tmp_path_factory.mktemp("three") / "card")


@pytest.mark.parametrize("name", MODELS)
def test_the_hubs_parser_reads_the_card_of_a_report(name: str, three: Card) -> None:
    run = Run.open(REPORTS / name)
    path = three.folder / f"model-card-{as_folder_name(run.model)}.md"
    card = ModelCard.load(path)
    assert card.data.model_name == run.model
    assert card.text.startswith(f"\n## {run.model}, {run.condition} input\n")
    model, results = model_index_to_eval_results(metadata_load(path)["model-index"])
    assert model == run.model
    values = {metric: run.metric(metric) for metric in HEADLINE_METRICS}
    expected = {metric: value for metric, value in values.items() if value == value}
    assert {result.metric_type: result.metric_value for result in results} == pytest.approx(expected, rel=1e-5)
    assert {result.dataset_type for result in results} == {run.condition}


def test_each_input_and_each_paper_is_a_dataset_of_its_own() -> None:
    """The hub groups numbers by dataset_type and dataset_config, and names a group after its first number."""
    names = ("smollm2-135m", "smollm2-135m-interventions", "claims/smollm2-135m")
    (card,) = sinkscope.card(*(REPORTS / name for name in names)).model_cards.values()
    _, results = model_index_to_eval_results(ModelCard(card).data.to_dict()["model-index"])
    by_dataset = {name: {one.metric_type for one in results if one.dataset_name == name} for name in
        {one.dataset_name for one in results}}  # fmt: skip
    texts = {name for name in by_dataset if name.startswith("natural: ")}
    assert len(texts) == 2
    assert all("sink_rate" in by_dataset[name] for name in texts)
    claims = Scorecard.open(REPORTS / names[2]).table
    judged = claims[~claims["outcome"].isin(NOT_JUDGED) & np.isfinite(claims["value"])]
    assert by_dataset.keys() - texts == set(judged["paper"])


@pytest.mark.parametrize("name", ["dinov2-small-pictures", "smollm2-135m-streaming"])
def test_a_run_without_metrics_has_a_card_of_its_findings(name: str) -> None:
    run = Run.open(REPORTS / name)
    (text,) = sinkscope.card(REPORTS / name).model_cards.values()
    assert f"## {run.model}" in text
    assert "metrics:" not in text


def test_a_dataset_is_uploaded_and_read_back(
    three: Card, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second upload replaces the first; without a token, or with a wrong name, one line says what to do."""
    for push, refused in (("a/b/c", r"--push a/b/c: name a dataset as ORG/NAME"), ("org/mine", "name it with --out")):
        with pytest.raises(InputError, match=refused):
            sinkscope.card(REPORTS / "mgm", push=push)
    assert three.folder is not None
    with pytest.raises(SinkscopeError, match=r"^uploading to org/atlas failed .*HF_TOKEN.*; .* is complete$"):
        upload(three.folder, "org/atlas")
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    for _ in range(2):
        upload(three.folder, "org/atlas")
    pushed = command_line("card", REPORTS / "mgm", "--out", tmp_path / "card", "--push", "org/mine")
    assert (pushed.exit_code, f"uploaded to {hub.url}/datasets/org/mine" in pushed.stderr) == (0, True)
    assert (Path(snapshot_download("org/mine", repo_type="dataset")) / "README.md").is_file()
    back = Path(snapshot_download("org/atlas", repo_type="dataset"))
    read = {path.relative_to(back).as_posix() for path in back.rglob("*.*")}
    cards = {f"model-card-{as_folder_name(model)}.md" for model in three.model_cards}
    assert read == {"README.md", *cards, *(f"tables/{name}.parquet" for name in three.tables)}
    configs = metadata_load(back / "README.md")["configs"]
    tables = {config["config_name"]: pd.read_parquet(back / config["data_files"]) for config in configs}
    for name, table in three.tables.items():
        pd.testing.assert_frame_equal(tables[name], table)
    models = tables["models"].set_index("model")
    assert (len(models), models.index.is_unique) == (3, True)
    assert all(models.loc[row.model, row.metric] == row.value for row in tables["metrics"].itertuples())
    assert (tables["layers"]["layer"] >= 0).all()


def test_models_whose_names_are_alike_have_cards_of_their_own() -> None:
    runs = [made_up(model={"name": name}) for name in ("a b", "a-b")]
    assert len(sinkscope.card(*runs).texts) == 3


def test_other_folders(tmp_path: Path) -> None:
    """Claims and changed models have cards, too; a folder of another kind is refused by name."""
    names = ("claims/mgm", "smollm2-135m-w8a8", "smollm2-135m-interventions")
    made = sinkscope.card(*(REPORTS / name for name in names))
    assert list(made.model_cards) == ["SmolLM2-135M-Instruct.Q4_1", "mgm"]
    index = [yaml.safe_load(card.split("---")[1])["model-index"] for card in made.model_cards.values()]
    changed, judged = (model_index_to_eval_results(one)[1] for one in index)
    claims = pd.read_parquet(REPORTS / "claims/mgm/tables/claim.parquet").query("passes in ('holds', 'fails')")
    outcomes = dict(zip(claims["claim"], claims["outcome"], strict=True))
    assert outcomes.items() <= {one.metric_type: one.metric_args["outcome"] for one in judged}.items()
    quantized = pd.read_parquet(REPORTS / "smollm2-135m-w8a8/tables/quantization.parquet")
    (perplexity,) = quantized.query("setting == 'all' and site == '' and sequences == 100")["perplexity"]
    perplexities = {one.metric_config: one.metric_value for one in changed if one.metric_type == "perplexity"}
    assert perplexities["all"] == pytest.approx(perplexity, rel=1e-5)
    assert {"zero-massive"} <= {setting.partition(":")[0] for setting in perplexities if setting}
    for folder, command in (("bigram-backcopy", "train"), ("smollm2-135m-kv-plan", "kv-plan")):
        with pytest.raises(InputError, match=rf"is of `sinkscope {command}`, not of `analyze`, .*`claims`, `sweep`"):
            sinkscope.card(REPORTS / folder)
    with pytest.raises(InputError, match="at least one run"):
        sinkscope.card()


def test_of_a_setting_that_was_measured_several_times_the_last_counts() -> None:
    """A run on few sequences tries more and more kept sites on all of them."""
    settings = ["full", "all", "costliest-kept", "costliest-kept", "alone"]
    table = pd.DataFrame({"setting": settings, "site": [*[""] * 4, "down_proj"], "sequences": [8] * 5})
    table = table.assign(perplexity=[10.0, 40.0, 30.0, 20.0, 35.0], kurtosis=np.inf)  # which no card can hold
    values = values_of(Run({"command": "quantize"}, {"quantization": table}))
    perplexities = dict(zip(values["setting"], values["value"], strict=True))
    assert (perplexities, len(values)) == ({"": 10.0, "all": 40.0, "costliest-kept": 20.0}, 3)


def test_a_rate_of_a_changed_model_is_that_at_position_0() -> None:
    run = Run.open(REPORTS / "smollm2-135m-interventions")
    whole = run.tables["effect"].query("layer == -1 and metric == 'sink_rate'")
    assert whole["position"].nunique() > 1
    rates = values_of(run).query("metric == 'sink_rate'").set_index("setting")["value"]
    means = whole[whole["position"] == 0].groupby(["name", "arm"])["value"].mean()
    settings = {"after": "{}", "control": "{}, random controls"}
    expected = {settings[arm].format(name): mean for (name, arm), mean in means.items() if arm != "before"}
    assert rates.drop("").to_dict() == pytest.approx(expected)
    assert rates[""] == pytest.approx(means.xs("before", level="arm").mean())


@pytest.mark.parametrize(("value", "shown"), [(1.23456789e-8, 1.23457e-8), (2 / 3, 0.666667), (12345678.9, 12345700.0)])
def test_a_card_has_six_significant_digits_of_small_and_large_numbers(value: float, shown: float) -> None:
    assert _rounded(value) == shown


def test_an_atlas_of_two_models(
    hub: Hub, tiny: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped atlas with the models of the loopback hub: its comparison, and a card with one row a model."""
    quick_sweeps(monkeypatch)
    content = yaml.safe_load((REPORTS.parent / "recipes/sweeps/atlas.yaml").read_text(encoding="utf-8"))
    entries = content["models"]
    assert len({entry["model"] for entry in entries}) == len(entries) > 40
    hub.repos |= {name: Repo({"main": folder}) for name, folder in ((entries[0]["model"], models / "gpt2"),
                                                                    (entries[30]["model"], tiny))}  # fmt: skip
    content["models"] = chosen = [entries[0], entries[30]]
    content["options"] |= {"num-seqs": 2, "seq-len": 16}
    (tmp_path / "atlas.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    done = sinkscope.sweep(tmp_path / "atlas.yaml", out=tmp_path / "atlas", workers=1)
    assert done.failure == ""
    assert (tmp_path / "atlas/comparison/index.html").is_file()
    made = sinkscope.card(tmp_path / "atlas", out=tmp_path / "card", page=False)
    rows = pd.read_parquet(tmp_path / "card/tables/models.parquet")
    assert rows["model"].tolist() == [entry["model"].split("/")[1] for entry in chosen]
    assert rows["family"].tolist() == [entry["family"] for entry in chosen]
    sweep = done.tables.rates.set_index("model")["sink_rate"]
    assert rows["sink_rate"].tolist() == sweep[rows["model"]].tolist()
    assert rows["commit"].str.len().tolist() == [40, 40]
    assert list(made.model_cards) == rows["model"].tolist()


def test_an_encoders_results_are_of_masked_tokens() -> None:
    for is_causal, task in ((True, "text-generation"), (False, "fill-mask")):
        assert {result.task_type for result in _results_of_run(made_up(family={"causal": is_causal}))} == {task}


def test_a_dataset_is_named_with_its_shortest_and_longest_sequence() -> None:
    for ends, lengths in (((64, 64), "64"), ((5, 64), "5 to 64")):
        results = _results_of_run(made_up(input=dict(zip(("shortest", "longest"), ends, strict=True))))
        assert {result.dataset_name for result in results} == {f"natural: 100 sequences of {lengths} tokens"}
        assert {result.dataset_config for result in results} == {f"100 x {lengths} tokens, 0123456789ab"}


def test_a_card_has_the_findings_on_all_runs_of_its_model_and_defines_only_their_metrics(tmp_path: Path) -> None:
    runs = made_up(model={"parameters": 7}), made_up("random")
    runs[1].tables["summary"].replace({"metric": {"kurtosis": "of_a_plugin"}}, inplace=True)  # which is not loaded
    made = sinkscope.card(*runs, out=tmp_path / "card", page=False)
    ((model, text),) = made.model_cards.items()
    assert [f"## {model}, {run.condition} input\n" in text for run in runs] == [True, True]
    assert made.tables["models"]["parameters"].tolist() == [7, 0]
    assert made.tables["metrics"]["metric"].tolist() == ["sink_rate", "kurtosis", "sink_rate"]
    metrics = re.findall(r"^\| (\w+) \|", (tmp_path / "card" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"sink_rate", "kurtosis"} == {*metrics} & METRICS.keys()
    assert not (tmp_path / "card" / "index.html").exists()


def test_claims_of_all_scorecards_are_in_the_dataset_and_only_numbers_in_cards() -> None:
    cards = [Scorecard.open(REPORTS / "claims" / name) for name in ("mgm", "smollm2-135m")]
    table = cards[1].table
    judged = table[~table["outcome"].isin(NOT_JUDGED) & np.isfinite(table["value"])].index
    table.loc[judged[0], "value"] = np.nan
    made = sinkscope.card(*cards)
    assert len(made.tables["claim"]) == sum(len(card.table) for card in cards)
    text = made.model_cards[cards[1].models[0]]
    _, results = model_index_to_eval_results(ModelCard(text).data.to_dict()["model-index"])
    assert len(results) == len(judged) - 1


def test_cells_of_a_sweep_have_the_names_of_its_file(tmp_path: Path) -> None:
    """Cells of different commands are in different tables of the comparison."""
    comparison = tmp_path / "comparison"
    comparison.mkdir()
    save(made_up(), tmp_path / "cells" / "measured")
    shutil.copytree(REPORTS / "claims" / "mgm", tmp_path / "cells" / "judged")
    cells = {"sweep": ("measured", "one", "GPT-2"), "sweep_claims": ("judged", "two", "MGM")}
    tables = {name: pd.DataFrame([cell], columns=["cell", "model", "family"]) for name, cell in cells.items()}
    write_tables(tables, comparison)
    for folder, names in ((comparison, tables), (tmp_path, ())):
        write_manifest(folder, make_manifest("sweep", {}, 0.0, names))
    made = sinkscope.card(tmp_path)
    assert list(made.model_cards) == [*made.tables["models"]["model"], "two"] == ["one", "two"]
    assert set(made.tables["claim"]["model"]) == {"two"}
