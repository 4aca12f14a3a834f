"""The file of a page, and its tables: the same numbers to six digits, and a description of rows that are left out."""

import base64
import hashlib
import json
import re
import zlib
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.made_up_runs import made_up, save
from support.pages import KINDS, analysis, data_of, expanded, table_of

from sinkscope.html_page import Contents, page_of
from sinkscope.html_page.compact import FAINTEST, STEPS, as_json, compact_column, compact_maps, compact_tables, cut
from sinkscope.html_page.contents import spreads
from sinkscope.html_page.html import page_data
from sinkscope.measuring.estimates import RUN_CLAIMS
from sinkscope.results.activations import Activations
from sinkscope.results.command_line import command_lines
from sinkscope.results.findings import Finding
from sinkscope.results.manifest import make_manifest, write_manifest
from sinkscope.results.run import RunData
from sinkscope.results.tables import Column

REPORTS = Path(__file__).parents[2] / "reports"
HOSTILE = "</script><script>document.title='run'</script><img src=x onerror=\"alert(1)\">'\"&\u2028"


@pytest.mark.parametrize("kind", KINDS)
def test_all_numbers_are_those_of_the_tables(kind: str) -> None:
    contents = KINDS[kind]()
    data = data_of(page_of(contents).html)
    for name, table in contents.all_tables.items():
        on_the_page = table_of(data, name)
        assert list(on_the_page) == list(table.columns)
        for column in table:
            if pd.api.types.is_float_dtype(table[column]):
                shown = [nan if value is None else value for value in on_the_page[column]]
                assert shown == pytest.approx(table[column].tolist()[: len(shown)], rel=5e-6, nan_ok=True)
            else:
                plain = [None if pd.isna(value) else value for value in table[column].tolist()]
                assert on_the_page[column] == plain[: len(on_the_page[column])]


def test_the_attention_that_a_token_receives_is_a_mean_of_the_table() -> None:
    contents = analysis()
    received = {tuple(key): weight for *key, weight in data_of(page_of(contents).html)["received"]}
    maps = contents.tables["attention_maps"]
    assert len(received) == len(maps.drop_duplicates(["layer", "head", "sequence", "key"]))
    rows = maps[(maps["layer"] == 1) & (maps["head"] == maps["head"].iloc[-1]) & (maps["key"] == 2)]
    for (layer, head, sequence), own in rows.groupby(["layer", "head", "sequence"]):
        assert received[layer, head, sequence, 2] == pytest.approx(own["weight"].mean(), rel=1e-5)


def test_hostile_texts_stay_data() -> None:
    contents = analysis(model=HOSTILE, condition=HOSTILE)
    tables = {name: table.replace({"<s>": HOSTILE}) for name, table in contents.tables.items()}
    html = page_of(Contents(contents.manifest | {HOSTILE: ["\ud800" + HOSTILE]}, tables)).html
    plain = page_of(analysis()).html
    assert html.count("<script") == plain.count("<script")
    assert "<img" not in html
    assert data_of(html)["manifest"][HOSTILE] == ["\ud800" + HOSTILE]
    html.encode("utf-8")


def test_only_the_pages_own_scripts_may_run_and_none_inserts_markup() -> None:
    page = page_of(analysis())
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page.html)
    scripts = re.findall(r"<script>(.*?)</script>", page.html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy.startswith("default-src 'none'; script-src ")
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert "unsafe-eval" not in policy
    own = "\n".join(scripts[2:])
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\.html\(|eval\(", own)
    shown = page._repr_html_()
    assert shown.startswith("<iframe")
    assert shown.count("<") == 2  # only the frame: the page in it is escaped


NONE = {"method": "none", "parameters": {}, "label": "none"}
VGA = {"method": "vga", "parameters": {"placement": "output"}}
RECIPE = {"name": "r", "content": {"options": {"num-seqs": 8}}}


@pytest.mark.parametrize(
    ("command", "config", "more", "lines"),
    [
        ("analyze", {"model": "a b", "num_seqs": 5, "seq_len": 64, "skip_parity": True}, {},
         ["sinkscope analyze --from run", "sinkscope analyze 'a b' --num-seqs 5 --skip-parity"]),
        ("analyze", {"observables": ["attention"]}, {"recipe": {"name": "r"}}, ["sinkscope run r"]),
        ("analyze", {"model": "m", "seed": 0, "num_seqs": 8, "input": "random"}, {"recipe": RECIPE},
         ["sinkscope run r m --input random"]),
        ("analyze", {"model": "m", "input": "random"},
         {"recipe": {"name": "r", "content": {"runs": {"one": {"input": "random"}}}}}, ["sinkscope run r m"]),
        ("retrofit", {"model": "m"},
         {"arms": {"none-seed0": NONE, "none-seed1": NONE, "a": VGA | {"label": "vga-placement=output"}}},
         ["sinkscope retrofit m --method none,vga:placement=output"]),
        ("train", {"config": "c"}, {"arms": {"plain": NONE | {"label": "plain"}}}, []),
        ("compare", {"runs": ["a", "b"]}, {}, ["sinkscope compare a b"]),
        ("sweep", {"content": {}}, {}, []),
        ("analyze", {"model": None}, {"model": {"source": "handed over"}}, []),
    ],
)  # fmt: skip
def test_the_command_that_repeats_a_run(command: str, config: dict, more: dict, lines: list[str], tmp_path) -> None:
    assert command_lines({"command": command, "config": config} | more, tmp_path / "run") == lines


@pytest.mark.parametrize(
    ("values", "kind", "shown"),
    [
        ([0.1, 1 / 3, -2e-9, 123456789.0, 0.0], "number", [0.1, 0.333333, -2e-9, 123457000.0, 0.0]),
        ([nan, inf, -inf, 1.0], "number", [None, inf, -inf, 1]),
        ([5.0] * 9, "number", [5] * 9),
        ([0, 1, 123456789], "whole", [0, 1, 123456789]),
        ([True, False], "truth", [1, 0]),
        (["a", "b", None, "a"], "text", ["a", "b", None, "a"]),
        ([HOSTILE, "\ud800", ""], "text", [HOSTILE, "\ud800", ""]),
        ([], "number", []),
    ],
)
def test_a_column_comes_back(values: list, kind: str, shown: list) -> None:
    text = compact_column(pd.Series(values, dtype=object if kind == "text" else None), kind)
    assert expanded(json.loads(text)) == shown
    assert "<" not in text
    assert text.isascii()


def test_equal_values_are_counted_and_json_cannot_end_its_script() -> None:
    assert compact_column(pd.Series([3, 3, 3, 3, 4]), "whole") == '{"runs":[3,4,4,1]}'
    assert as_json({"<!--": "</script>"}) == '{"\\u003c!--":"\\u003c/script>"}'


def test_a_table_is_cut_after_a_complete_sequence_or_position_or_after_its_first_rows() -> None:
    by_sequence = pd.DataFrame({"sequence": [0, 1, 2] * 4, "value": range(12)}).sort_values("sequence")
    kept, left_out = cut(by_sequence, 100, 9)
    assert kept["sequence"].value_counts().to_dict() == {0: 4, 1: 4}
    assert left_out == "only the rows of sequence 0 to 1 are here, 2 of 3"
    assert cut(by_sequence, 100, len(by_sequence))[1] == ""

    arms = pd.DataFrame({"run": ["a"] * 3 + ["b"] * 3, "position": [0, 1, 2] * 2, "value": range(6)})
    kept, left_out = cut(arms, 5, 1)
    assert kept["value"].tolist() == [0, 1, 3, 4]
    assert left_out == "only the rows of position 0 to 1 are here, 2 of 3"
    assert cut(arms, 1, 1)[1] == "only the first 1 rows are here"  # the first position has more
    rows, left_out = cut(arms.assign(sequence=0), 5, 4)  # all of one sequence
    assert (rows["position"].tolist(), left_out) == ([0, 1, 0, 1], "only the rows of position 0 to 1 are here, 2 of 3")

    kept, left_out = cut(pd.DataFrame({"value": range(2000)}), 1500, 1)
    assert (len(kept), left_out) == (1500, "only the first 1,500 rows are here")
    assert cut(kept, 1500, 1)[1] == ""


def test_tables_are_cut_until_they_fit_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.html_page.compact.LARGEST", 9_000)
    table = pd.DataFrame({"sequence": range(20_000), "value": 0.123456})
    (cut,) = json.loads(compact_tables({"long": table}, {"long": (Column("value", "meaning", "nats"),)}))
    assert cut["rows"] == 20_000
    assert cut["left_out"] == "only the rows of sequence 0 to 999 are here, 1000 of 20000"
    assert cut["columns"][1] == {
        "name": "value", "about": "meaning", "unit": "nats", "kind": "number", "values": {"runs": [0.123456, 1000]},
    }  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
def test_maps_of_all_heads_are_rounded_and_cut_to_fewer_tokens_until_they_fit(causal: bool, monkeypatch) -> None:
    weights = torch.rand(2, 1, 3, 50, 50, generator=torch.manual_seed(0)) ** 6
    kept = weights.tril() if causal else weights
    kept[0] = kept[0].tril()  # one layer alone does not make a model causal
    padded = torch.nn.functional.pad(kept, (0, 9, 0, 9), value=0.5).half()
    mask = {"attention_mask": torch.tensor([[1] * 50 + [0] * 9])}
    activations = Activations({f"attention.{layer}": one for layer, one in zip((0, 10), padded, strict=True)} | mask)
    assert (compact_maps(activations) or {})["tokens"] == 50
    monkeypatch.setattr("sinkscope.html_page.compact.MAPS", 2_500 if causal else 5_000)
    maps = compact_maps(activations) or {}
    assert (maps["heads"], maps["tokens"], maps["causal"]) == ([[0, 3], [10, 3]], 24, causal)
    codes = np.frombuffer(zlib.decompress(base64.b64decode(maps["codes"])), np.uint8)
    shown = np.where(codes, FAINTEST ** (1 - (codes - 1.0) / STEPS), 0)
    rows, columns = np.tril_indices(24) if causal else np.indices((24, 24)).reshape(2, -1)
    expected = kept[:, 0, :, rows, columns].numpy().ravel()
    np.testing.assert_allclose(shown, expected, rtol=0.019, atol=FAINTEST)
    assert (shown > 0).mean() > 0.5
    assert compact_maps(Activations()) is None


def test_a_sweep_and_an_experiment_begin_with_a_table_that_sums_them_up() -> None:
    (sweep,) = Contents.of_folder(REPORTS / "offline-models").overviews.values()
    assert sweep.query("model == 'gemma3-270m' and BOS == 'with'")["natural"].item() == "78.7%"
    contents = Contents.of_folder(REPORTS / "over-mixing/smollm2-135m")
    (arms,) = contents.overviews.values()
    rate = contents.tables["effect"].query("layer == -1 and metric == 'sink_rate' and position == 0 and arm == 'after'")
    shown = arms.set_index("arm")["sink rate @0"]
    for row in rate.itertuples():
        assert shown[row.condition] == f"{row.value:.1%}"


def test_findings_on_states_have_their_nulls() -> None:
    contents = Contents.of_folder(REPORTS / "residual-stream/smollm2-135m")
    findings = {finding.name: finding for finding in contents.findings}
    entropy, spikes = contents.tables["entropy"].set_index("layer"), contents.tables["spikes"]
    valley = findings["state-entropy"]
    assert valley.value == entropy["entropy"].min()
    assert valley.numbers["entropy_without_first"] == entropy["entropy_without_first"][valley.numbers["layer"]]
    assert findings["residual-sinks"].numbers["rotated"] == spikes["rotated_share"].max() < 0.1
    assert findings["spike"].numbers["cosine"] > findings["spike"].numbers["cosine_of_others"]


def test_a_page_has_the_tables_of_its_runs_with_their_names_and_of_sequences_only_maps() -> None:
    names = ("attention", "attention_by_sequence", "attention_maps", "comparison")
    parts = {
        label: RunData({}, {name: pd.DataFrame({"value": [at]}) for name in names}) for at, label in enumerate("ab")
    }
    manifest = {"command": "compare", "config": {}, "tables": []}
    contents = Contents(manifest, {"comparison": pd.DataFrame({"value": [7]})}, parts)
    joined = {"run": ["a", "b"], "value": [0, 1]}
    expected = {"attention": joined, "attention_maps": joined, "comparison": {"value": [7]}}
    assert {name: table.to_dict("list") for name, table in contents.all_tables.items()} == expected


def test_a_page_links_pages_that_exist_and_names_runs_that_do_not(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("seen", "unseen", "missing")}
    for name in ("seen", "unseen"):
        save(made_up(), places[name])
    (places["seen"] / "index.html").touch()
    both = tmp_path / "both"
    both.mkdir()
    runs = [{"label": name, "folder": str(place)} for name, place in places.items()]
    write_manifest(both, make_manifest("compare", {}, 0.0, runs=runs, differing={}, activations=["attention.0"]))
    contents = Contents.of_folder(both)
    assert (list(contents.parts), contents.absent) == (["seen", "unseen"], ("run missing", "activations.safetensors"))
    assert json.loads(page_data(contents))["links"] == {"seen": "./../seen/index.html"}


def test_a_finding_has_the_statement_of_its_claim() -> None:
    claim, about = next(iter(RUN_CLAIMS.items()))
    contents = replace(analysis(), findings=[Finding("name", "Section", claim=claim)])
    assert json.loads(page_data(contents))["findings"][0]["statement"] == about.statement


def test_a_spread_is_that_of_finite_values() -> None:
    table = pd.DataFrame({"arm": list("aaabb"), "value": [1.0, inf, 3.0, nan, 5.0]})
    assert spreads(table, ["arm"]) == [("a", 2.0, 2**0.5, 2), ("b", 5.0, None, 1)]
