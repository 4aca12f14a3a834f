"""The sentences of reports: their numbers stand in the tables, verdicts and manifests of the same folder."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.printed_numbers import Printed, all_numbers, numbers_of, stands_in

from sinkscope.commands.claims.over_seeds import mean_of_ratios
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.scorecard import Scorecard
from sinkscope.commands.sweep.output import words
from sinkscope.commands.sweep.tables import SweepTables
from sinkscope.commands.train.output import Trained
from sinkscope.measuring.summary import compress_fits
from sinkscope.output.run import Run
from sinkscope.results.manifest import read_manifest

REPORTS = Path(__file__).parents[1] / "reports"
# the table of the spike masks has single seeds, the text their means
TEXTS = sorted(path for path in REPORTS.rglob("README.md") if path.parent.name not in ("reports", "spike-mask"))
# not measured, or computed from the tables: by report, as printed
OTHERWISE = {
    "claims": {len(CLAIMS): "all claims", 1.75: "the exponential of FT-1's number"},
    "dinov2-small-pictures": {518: "pixels"},
    "gemma3-270m-float16": {24024: "of the other report that it names"},
    "gradient-sinks-from-scratch": dict.fromkeys((0.858, 0.814, 0.905, 0.863, 0.789, 0.945), "below"),
    "gradient-valves": dict.fromkeys((1.061, 1.058, 1.063, 0.854, 0.823, 0.885, 0.889, 0.895, 0.901), "below"),
    "isolate": dict.fromkeys((23483, 23624, 8556, 6626, 1316, 1477), "of the table of norms, or a mean of it"),
    "normalization-on-text": dict.fromkeys((11.1, 32.3, 28.6), "read from its curves"),
    "quantization-prefix": {409000: "the end of an interval, rounded"},
    "residual-stream": {2510.06477: "a paper", 2512.22213: "a paper", 2601.22966: "a paper", 2603.05498: "a paper",
                        6300: "a rounded ratio"},
    "scan": {13.5: "of a benchmark"},
    "smollm2-135m": {2252: "1 ÷ compress", -0.795: "below"},
    "smollm2-135m-interventions": {86110: "below", 5.95: "millions"},
    "smollm2-135m-retrofit": {6000: "tokens"},
    "smollm2-135m-w8a8": {1000: "a threshold", 259: "a difference", 3e-6: "a share, rounded"},
    "super-weights": {8.86: "of the claims", 6.64: "of the claims"},
    "when-sinks-emerge": {
        **dict.fromkeys((806, 4096, 10.2, 156, 256), "settings"),
        **dict.fromkeys((2320, 2640, 46.9, 28.9), "of runs whose tables are not kept"),
    },
}  # fmt: skip

MADE = sorted(
    path
    for name in ("verdict.md", "retrofit.md", "scorecard.md", "sweep.md")
    for path in REPORTS.rglob(name)
    if (path.parent / "run.json").exists() and read_manifest(path.parent, None)["command"] != "analyze"
)
# what is said from tables that are too large to be kept, such as those by sequence, about the runs of arms, and files
NOT_FROM_THE_KEPT_TABLES = re.compile(
    r" \(95 % interval [^)]*\)|; (\d+% of the sinks at other positions|the largest massive activation is ).*(?=\.$)"
    r"|^The weights are those of .*|^- \*\*`.*Published: .*|^### Files(.|\n)*",
    flags=re.MULTILINE,
)
WITH_LARGER_TABLES = ("claims", "intervene", "train")  # commands whose texts have further lines


def without_markup(text: str) -> str:
    """Return the sentences and tables, without code, addresses, ids of claims, and what papers published."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|^!\[.*?$", " ", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\b[A-Z]{1,3}-\d+\b", " ", text)
    return re.sub(r"\*[Pp]ublished:\*.*?(?=\n\n|\Z|Here |\n- |\))", " ", text, flags=re.DOTALL)


def precise(text: str) -> list[Printed]:
    """Return the numbers of three digits or more; shorter ones stand in any large table."""
    numbers = numbers_of(without_markup(text))
    return [number for number in numbers if len(f"{abs(number.value):g}".replace(".", "").strip("0")) >= 3]


def of_json(content: object) -> Iterator[float]:
    if isinstance(content, dict | list):
        for item in content.values() if isinstance(content, dict) else content:
            yield from of_json(item)
    elif isinstance(content, int | float) and abs(content) < 1e15:
        yield abs(float(content))


def measured(folder: Path) -> np.ndarray:
    tables = [pd.read_parquet(path) for path in folder.rglob("*.parquet")]
    tables += [pd.read_csv(path) for path in folder.rglob("*.csv")]
    parts = [all_numbers(tables)] if tables else []
    for path in folder.rglob("*.md"):
        if path.name != "README.md":
            parts.append(np.array([abs(number.value) for number in numbers_of(path.read_text(encoding="utf-8"))]))
    parts += [np.fromiter(of_json(json.loads(path.read_text("utf-8"))), float) for path in folder.rglob("*.json")]
    return np.concatenate(parts)


def unfounded(numbers: list[Printed], known: np.ndarray, name: str) -> list[float]:
    otherwise = OTHERWISE.get(name, {})
    return [number.value for number in numbers if number.value not in otherwise and not stands_in(number, known)]


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.parent.name)
def test_the_numbers_of_a_report_are_those_of_its_tables(text: Path) -> None:
    name = text.parent.name
    numbers = precise(text.read_text(encoding="utf-8"))
    assert unfounded(numbers, measured(text.parent), name) == [], "in no table, nor in OTHERWISE above"
    printed = {number.value for number in numbers_of(without_markup(text.read_text(encoding="utf-8")))}
    assert set(OTHERWISE.get(name, {})) <= printed  # the list has nothing that is not said


def test_the_report_of_claims_counts_all_of_them() -> None:
    assert f" of the {len(CLAIMS)} claims;" in (REPORTS / "claims" / "README.md").read_text(encoding="utf-8")


def test_the_numbers_of_the_index_are_those_of_the_reports() -> None:
    index = (REPORTS / "README.md").read_text(encoding="utf-8")
    sections = re.findall(
        r"^### \[[^\]]*\]\(([^)]+)/README\.md\)\n(.*?)(?=^##|\Z)", index, flags=re.DOTALL | re.MULTILINE
    )
    assert len(sections) > 25
    for folder, text in sections:
        told = (REPORTS / folder / "README.md").read_text(encoding="utf-8")
        known = np.array([abs(number.value) for number in numbers_of(without_markup(told))])
        known = np.concatenate([known, measured(REPORTS / folder)])
        assert unfounded(precise(text), known, folder) == [], folder


def written(path: Path) -> str:
    """Return the text that the code writes today from the tables of a report."""
    folder = path.parent
    manifest = read_manifest(folder, None)
    if path.name in ("verdict.md", "scorecard.md"):
        return (Run if path.name == "verdict.md" else Scorecard).open(folder).texts[path.name]
    tables = {table.stem: pd.read_parquet(table) for table in folder.glob("tables/*.parquet")}
    if path.name == "sweep.md":
        return words(SweepTables(tables, {}), manifest["config"])
    return Trained(manifest, tables, folder=folder, runs={}).verdict


@pytest.mark.parametrize("path", MADE, ids=lambda path: str(path.parent.relative_to(REPORTS)))
def test_a_report_says_what_the_code_says_of_its_tables(path: Path) -> None:
    report, now = (
        NOT_FROM_THE_KEPT_TABLES.sub("", text).split("\n") for text in (path.read_text("utf-8"), written(path))
    )
    assert [line for line in now if line not in report] == []
    if read_manifest(path.parent, None)["command"] not in WITH_LARGER_TABLES:
        assert [line for line in report if line not in now] == []


def with_interval(ratios: pd.Series) -> str:
    mean = mean_of_ratios(ratios.to_numpy())
    return f"{mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}]"


def test_the_norm_of_other_tokens_falls_with_v_scale_too() -> None:
    """The largest norm of position 0 over layers, and that of later tokens, which is the first ÷ their ratio."""
    keys = ["seed", "condition", "layer"]
    table = pd.read_parquet(REPORTS / "gradient-sinks-from-scratch" / "tables" / "training.parquet")
    at_end = table[(table["step"] == table["step"].max()) & (table["layer"] >= 0)]
    of = {name: rows.set_index(keys)["value"] for name, rows in at_end.groupby("metric")}
    first, others = (
        by_layer.groupby(keys[:2]).max().unstack()
        for by_layer in (of["first_norm"], of["first_norm"] / of["norm_ratio"])
    )
    first, others = (table["V-scale"] / table["plain"] for table in (first, others))
    text = " ".join((REPORTS / "gradient-sinks-from-scratch" / "README.md").read_text("utf-8").split())
    for ratios in (first, others, first / others):
        assert with_interval(ratios) in text


def test_the_norm_grows_as_much_as_the_report_of_the_valves_says() -> None:
    table = pd.read_parquet(REPORTS / "gradient-valves" / "tables" / "training.parquet")
    norms = table[(table["layer"] == -1) & (table["metric"] == "first_norm")]
    by_step = norms.pivot_table(index=["seed", "condition"], columns="step", values="value")
    growth = (by_step.iloc[:, -1] / by_step.iloc[:, 0]).unstack()
    text = " ".join((REPORTS / "gradient-valves" / "README.md").read_text("utf-8").split())
    arms = ("gradient-valve", "control", "amplifier", "amplifier-control", "value-valve", "V-scale")
    for ratios in (*(growth[arm] / growth["plain"] for arm in arms), growth["gradient-valve"] / growth["control"]):
        assert with_interval(ratios) in text


def test_zeroed_massive_activations_multiply_perplexity_as_the_report_says() -> None:
    effect = pd.read_parquet(REPORTS / "smollm2-135m-interventions" / "tables" / "effect.parquet")
    loss = effect[(effect["condition"] == "zero-massive") & (effect["metric"] == "loss")].set_index("arm")["value"]
    factor = np.exp(loss["after"] - loss["before"])
    assert f"{factor:,.0f}"[:4] in (REPORTS / "smollm2-135m-interventions" / "README.md").read_text("utf-8")


def test_the_slope_of_compression_is_that_of_all_layers() -> None:
    ratios = pd.read_parquet(REPORTS / "smollm2-135m" / "tables" / "gradient_ratio.parquet").query("branch == 'attn'")
    slopes = [
        compress_fits(rows)["compress_slope"]
        for rows in (ratios, ratios.query("layer > 0"), ratios.query("position > 0"))
    ]
    text = " ".join((REPORTS / "smollm2-135m" / "README.md").read_text("utf-8").split())
    words = "slope {:.3f} (r = −0.96) over all layers", "without layer 0 it is {:.2f}", "without position 0 {:.2f}"
    for sentence, slope in zip(words, slopes, strict=True):
        assert sentence.format(slope).replace("-0", "−0") in text
