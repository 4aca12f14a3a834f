"""Runs of `analyze` side by side: their names, their metrics, and the settings in which they differ."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from sinkscope.errors import InputError, unknown
from sinkscope.results.manifest import make_manifest
from sinkscope.results.metric_estimates import difference, reads_the_same
from sinkscope.results.run import RunData, policy_of
from sinkscope.results.sequences import Sequences
from sinkscope.results.statistics import differences
from sinkscope.results.tables import SUMMARY_COLUMNS, WHOLE_MODEL, Columns

ComparedSettings = Mapping[str, Callable[[dict[str, Any]], Any]]  # name of a setting → its value in run.json
# the settings that two runs must share for their numbers to be comparable
COMPARED_SETTINGS: ComparedSettings = {
    # the condition of a retrofit's arm is its method
    "input": lambda manifest: manifest["input"].get("text", manifest["condition"]),
    "input tokens": lambda manifest: str(manifest["input"]["sha256"])[:12],
    "BOS": lambda manifest: policy_of(manifest["input"]["token_zero"]),
    "position 0": lambda manifest: manifest["input"]["token_zero"],
    "sequences": lambda manifest: manifest["input"]["sequences"],
    "seq-len": lambda manifest: span((manifest["input"]["shortest"], manifest["input"]["longest"])),
    "window": lambda manifest: manifest["config"]["window"],
    "positions": lambda manifest: manifest["config"]["positions"],
    "epsilon": lambda manifest: manifest["config"]["epsilon"],
    "dtype": lambda manifest: manifest["dtype"],
    "kernel": lambda manifest: manifest["kernel"],
    "calibration": lambda manifest: manifest["config"]["calibration"],
    "grids": lambda manifest: [manifest["config"][f"{part}_per"] for part in ("weights", "activations", "kv_cache")],
    "sinkscope": lambda manifest: manifest["sinkscope"],
}
# those that name runs of one model on one input
NAMING_SETTINGS = {name: COMPARED_SETTINGS[name] for name in ("BOS", "seq-len", "window", "epsilon", "dtype", "kernel")}


class Summary(RunData):
    """A run of which only the table `summary` is read, without importing what measures the others."""

    columns: ClassVar[Mapping[str, Columns]] = {"summary": SUMMARY_COLUMNS}


def metrics_of(runs: Sequence[RunData], names: Sequence[str], metrics: Sequence[str] = ()) -> pd.DataFrame:
    """Return metrics (all of them by default) of the whole model by run.

    For two runs there are also `difference` (second − first), which is 0 if it is no more than round-off, its interval
    over texts (NaN if a run has no values by sequence), and `ratio`. Raises InputError for a metric that no run has.
    """
    whole = []
    for run in runs:
        if "summary" not in run.tables:
            raise InputError(f"{run.folder or run.model} has no metrics to compare: it measured only pictures")
        summary = run.tables["summary"]
        whole.append(summary[summary["layer"] == WHOLE_MODEL].set_index("metric")["value"])
    table = pd.concat(whole, axis=1, keys=names, sort=False).rename_axis("metric")
    if missing := [name for name in metrics if name not in table.index]:
        raise InputError(f"--metrics: {unknown(missing[0], table.index)}")
    table = table.loc[[*metrics] or table.index]
    if len(runs) == 2:
        first, second = table.iloc[:, 0], table.iloc[:, 1]
        apart = differences(first.to_numpy(), second.to_numpy())
        table["difference"] = apart
        sequences = Sequences(runs[0]), Sequences(runs[1])
        estimates = [difference(*sequences, metric) for metric in table.index]
        table["difference_low"], table["difference_high"] = zip(
            *((each.low, each.high) for each in estimates), strict=True
        )
        table["ratio"] = (second / first.where(first != 0)).mask((apart == 0) & (first != 0), 1.0)
    return table


def pairing_lines(runs: Sequence[RunData]) -> list[str]:
    """Return a line that says how two runs are compared; none for more runs."""
    if len(runs) != 2:
        return []
    is_paired = reads_the_same(*map(Sequences, runs))
    how = "paired: both runs read the same tokens" if is_paired else "unpaired: the runs read other tokens"
    return [f"differences have 95 % intervals over texts, {how}"]


def differing_settings(
    manifests: Sequence[dict[str, Any]], names: Sequence[Any], settings: ComparedSettings = COMPARED_SETTINGS
) -> pd.DataFrame:
    """Return a row for each setting of the manifests in which the runs differ, and a column for each run."""

    def setting(read: Callable[[dict[str, Any]], Any], manifest: dict[str, Any]) -> str:
        try:
            return str(read(manifest))
        except (KeyError, TypeError):
            return "not recorded"

    rows = {name: [setting(read, manifest) for manifest in manifests] for name, read in settings.items()}
    differing = {name: values for name, values in rows.items() if len(set(values)) > 1}
    if "input" in differing:
        differing.pop("input tokens", None)  # they differ whenever the input does
    return pd.DataFrame.from_dict(differing, orient="index", columns=list(names))


def differing_lines(differing: Mapping[Any, Mapping[Any, object]]) -> list[str]:
    """Return a line for each setting: "dtype differs: float32 (a), bfloat16 (b)"."""
    return [
        f"{setting} differs: {', '.join(f'{value} ({run})' for run, value in values.items())}"
        for setting, values in differing.items()
    ]


def labels(runs: Sequence[RunData]) -> tuple[list[str], str]:
    """Return labels of runs, the parts of model, revision and condition that differ, and the common parts.

    Runs that have these in common are labeled by the settings that differ, or else by numbers.
    """
    parts = [(model_name(run.model), run.manifest["model"].get("revision") or "", run.condition) for run in runs]
    differ = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    names = [" · ".join(part for part, keep in zip(row, differ, strict=True) if keep and part) for row in parts]
    common = " · ".join(part for part, keep in zip(parts[0], differ, strict=True) if part and not keep)
    if len(runs) == 1:
        return [common], common
    if len(set(names)) < len(names):
        settings = differing_settings([run.manifest for run in runs], range(len(runs)), NAMING_SETTINGS)
        for place, values in settings.items():
            named = " · ".join(f"{setting} {value}" for setting, value in values.items())
            names[place] = " · ".join(part for part in (names[place], named) if part)
    names = [shorten(name, 48) for name in names]
    if len(set(names)) < len(names):
        names = [f"{name} ({place})" if name else f"run {place}" for place, name in enumerate(names, 1)]
    return names, common


def model_name(model: str) -> str:
    """Return the part of a hub id or a path after the last slash."""
    return model.rstrip("/").split("/")[-1]


def shorten(text: str, longest: int) -> str:
    """Leave out the middle of a text that is too long, because names differ at their ends."""
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def span(ends: tuple[int, int]) -> str:
    """Return "64" for (64, 64) and "5 to 12" for (5, 12)."""
    return f"{ends[0]}" if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def comparison_manifest(
    start: float, tables: Iterable[str], runs: Iterable[Mapping[str, Any]], differing: pd.DataFrame
) -> dict[str, Any]:
    """Return the manifest of a comparison of runs, each with its label, its folder and further entries."""
    recorded = [{**run, "folder": run["folder"] and str(run["folder"])} for run in runs]
    config = {"runs": [run["folder"] for run in recorded]}
    return make_manifest("compare", config, start, tables, runs=recorded, differing=differing.to_dict(orient="index"))


def distinct_names(models: Sequence[tuple[str, Path | None]]) -> list[str]:
    """Return the names of the models; a repeated name gets the name of its folder, or a number."""
    counts = Counter(model for model, _ in models)
    names = [f"{model} ({folder.name})" if folder and counts[model] > 1 else model for model, folder in models]
    again = Counter(names)
    return [f"{name} ({place})" if again[name] > 1 else name for place, name in enumerate(names, 1)]
