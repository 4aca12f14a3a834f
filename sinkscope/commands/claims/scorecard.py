"""The scorecard: the judgment of every claim on the runs of one or several models, and its Markdown.

Its folder has run.json, figures, scorecard.md, the tables `claim` and `route`, and the measured runs in runs/ROLE. Runs
of several models that were passed as objects are in runs/MODEL-ROLE.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf, isnan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.commands.claims.claim import UNSHOWN, Part
from sinkscope.commands.claims.columns import CLAIM, COMMAND, ROUTE, TABLES
from sinkscope.commands.claims.evidence import NATURAL
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.routes import ROUTES_TITLE, models_with_routes, routes_text
from sinkscope.commands.claims.table import NOT_JUDGED
from sinkscope.errors import InputError, counted, unknown
from sinkscope.figures import KINDS
from sinkscope.options.option import distinct_folder_name
from sinkscope.options.recipe import shipped
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.judgment import MOST_SEEDS
from sinkscope.results.manifest import folder_of, read_manifest
from sinkscope.results.metrics import MISSING
from sinkscope.results.papers import NEEDS_GPT2, gamma_table, printed_gamma
from sinkscope.results.run import RunData
from sinkscope.results.side_by_side import comparison_manifest, differing_settings, distinct_names
from sinkscope.results.statistics import LEVEL
from sinkscope.results.tables import names_of, read_table
from sinkscope.verdict.table_formats import as_markdown


def _option(name: str, manifest: Mapping[str, Any]) -> Any:
    """Return an option of a scorecard; if it judged other runs, its options are not those of these runs."""
    return "its runs'" if manifest["config"].get("from_") else manifest["config"].get(name)


# options in which scorecards side by side may differ
SCORECARD_OPTIONS = {
    name: partial(_option, name)
    for name in ("input", "dataset", "num_seqs", "seq_len", "window", "epsilon", "dtype", "bos", "seed", "draws")
}


@dataclass(frozen=True)
class Scorecard(Result):
    """The outcome of every claim.

    Attributes:
        manifest: The content of run.json.
        tables: `claim` and `route`.
        folder: Its folder; None if it is in memory only.
        runs: The runs that were judged, by model and role.
    """

    runs: Mapping[str, Mapping[str, RunData]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "Scorecard":
        """Open the folder of a run of `claims`. Raises InputError for another folder, or a damaged one."""
        folder = folder_of(folder)
        manifest = read_manifest(folder, (COMMAND,))
        tables = {
            name: read_table(folder / "tables" / f"{name}.parquet", schema)
            if name in manifest["tables"]
            else pd.DataFrame(columns=names_of(schema))  # a report keeps only some tables
            for name, schema in TABLES.items()
        }
        return cls(manifest, tables, folder.absolute())

    @property
    def table(self) -> pd.DataFrame:
        """A row for each number of a claim, per model."""
        return self.tables[CLAIM]

    @property
    def routes(self) -> pd.DataFrame:
        """A row for each route by which the first token may become a sink, per model."""
        return self.tables[ROUTE]

    @property
    def measured(self) -> dict[str, RunData]:
        """Name → run, for runs without a folder: its first role, after the model's name if there are several models."""
        runs: dict[str, RunData] = {}
        several = sum(map(bool, self.runs.values())) > 1  # variants of a model have no runs of their own
        for model, by_role in self.runs.items():
            for role, run in by_role.items():
                if run.folder is None and all(run is not measured for measured in runs.values()):
                    runs[distinct_folder_name(model, role) if several else role] = run
        return runs

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(self.table["model"]))

    def outcome(self, claim: str, model: str | None = None) -> Outcome:
        """Return the outcome of a claim, by default for the first model. Raises InputError for an unknown name."""
        if model is not None and model not in self.models:
            raise InputError(f"model {unknown(model, self.models)}")
        rows = self.table[self.table["model"] == (model or self.models[0])]
        if claim not in set(rows["claim"]):
            raise InputError(f"claim {unknown(claim, rows['claim'].unique())}")
        return Outcome(rows[rows["claim"] == claim]["outcome"].iloc[0])

    @property
    def by_model(self) -> pd.DataFrame:
        wide = self.table[self.table["part"] == 0].pivot(index="claim", columns="model", values="outcome")
        return wide.reindex(index=[name for name in CLAIMS if name in wide.index], columns=self.models)

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        """The numbers by paper for one model, or the outcomes for several models; then the routes."""
        if len(self.models) > 1:
            tables = {"Claims": _outcomes(self)}
        else:
            judged = self.table[~self.table["outcome"].isin(NOT_JUDGED)]
            tables = {str(paper): _printed(rows) for paper, rows in judged.groupby("paper", sort=False)}
        return tables | ({ROUTES_TITLE: routes_text(self.routes)} if models_with_routes(self.routes) else {})

    @property
    def texts(self) -> Mapping[str, str]:
        return {"scorecard.md": f"{self.markdown}\n\n{LEGEND}\n"}

    @property
    def drawings(self) -> Drawings:
        of_routes = drawings_of(KINDS["interventions on several models"], self.routes)
        return {**drawings_of(KINDS["claims"], self), **of_routes}

    @property
    def markdown(self) -> str:
        return scorecard_markdown(self)

    def _repr_markdown_(self) -> str:  # for notebooks
        return self.markdown


def summaries(folder: Path) -> Mapping[str, pd.DataFrame]:
    """Return the tables that `compare` prints of the folder of a scorecard."""
    return Scorecard.open(folder).summary_tables


def scorecards(folders_or_cards: Sequence[Any], start: float) -> Scorecard:
    """Return one scorecard of all models; scorecards of the same model are distinguished by their folders."""
    cards = [one if isinstance(one, Scorecard) else Scorecard.open(one) for one in folders_or_cards]
    if empty := [card.folder for card in cards if not card.models]:
        raise InputError(f"{empty[0]} has no claims to compare")
    names = iter(distinct_names([(model, card.folder) for card in cards for model in card.models]))
    renamed = [{model: next(names) for model in card.models} for card in cards]
    tables = {}
    for name in (CLAIM, ROUTE):
        parts = [card.tables[name].replace({"model": new}) for card, new in zip(cards, renamed, strict=True)]
        tables[name] = pd.concat(parts, ignore_index=True)
    labels = [", ".join(new.values()) for new in renamed]
    differing = differing_settings([card.manifest for card in cards], labels, SCORECARD_OPTIONS)
    facts = [{"label": label, "folder": card.folder} for label, card in zip(labels, cards, strict=True)]
    return Scorecard(comparison_manifest(start, TABLES, facts, differing), tables)


# --- words

# whether a claim distinguishes the model from its null → heading of the claims that hold
KINDS_OF_HOLDING = {
    "yes": "Hold, and their null does not pass them",
    "no": "Hold, and their null passes them or gives as much",
    "undefined": "Hold, and their null is not defined",
    "": "Hold, and no null was measured",
    "theorem": "Hold as theorems and identities do, which test the code",
}
LEGEND = (
    "Null: data on which the test of a claim should not pass: the same architecture with random weights, each tensor "
    "drawn with the mean and the standard deviation that it has in the model; for an intervention its random "
    "controls; for a trained method a plain training of another seed; for a curve over steps the steps in random "
    "order. Mean (least to most) over draws, and the share of draws that pass, if any does. A null is not defined if "
    "no draw has what a claim speaks of. Claims joined by = are one number, which is counted once. Intervals are "
    "two-sided at 95 %: a claim whose truth is just at its threshold is decided in 5 % of studies, and holds falsely "
    "in 2.5 %. Over seeds they are Student's, for ratios of logarithms; for rates and correlations they stay within "
    "the range; for the largest or smallest of several numbers they are simultaneous. Power: the probability that "
    "this number of seeds shows the claim if it is true; below 50 % there are not enough seeds. ‡ the threshold is "
    "ours, not the paper's. † taken from public transcriptions or the authors' code."
)


def scorecard_markdown(card: Scorecard) -> str:
    by_model = dict(list(card.table.groupby("model", sort=False)))
    several = len(by_model) > 1
    name = f"{len(by_model)} models" if several else card.models[0]
    parts = [f"## {name}: {headline(card.table)}", *_unusual(card.table)]
    if several:
        outcomes = _outcomes(card)
        for model, rows in by_model.items():
            parts += [f"**{model}**", *_summary(rows)]
        undecided = ", ".join(name for name in card.by_model.index if name not in set(outcomes["claim"]))
        parts += [as_markdown(outcomes), f"Decided by no model: {undecided}."]
        reasons = {model: _by_reason(rows, Outcome.DOES_NOT_APPLY) for model, rows in by_model.items()}
        if any(reasons.values()):
            parts += ["Why claims do not apply:", *(f"- {model}: {text}." for model, text in reasons.items() if text)]
        parts += _numbers_of_some(card)
    else:
        parts += _summary(card.table)
        for paper, rows in card.table.groupby("paper", sort=False):
            parts.append(f"### {paper}")
            judged = rows[~rows["outcome"].isin(NOT_JUDGED)]
            if len(judged):
                parts.append(as_markdown(_printed(judged)))
                published = judged[(judged["part"] == 0) & (judged["published"] != "")]
                lines = [f"- {row.claim}: {row.published}" for row in published.itertuples()]
                parts += ["Published:\n\n" + "\n".join(lines)] if lines else []
            texts = {outcome: _by_reason(rows, outcome) for outcome in NOT_JUDGED}
            parts += [f"{str(outcome).capitalize()}: {text}." for outcome, text in texts.items() if text]
    runs = {model: of_model[NATURAL] for model, of_model in card.runs.items() if NATURAL in of_model}
    computed = {model: table for model, run in runs.items() if (table := gamma_table(run)) is not None}
    if computed:
        parts.append("### |γ| where EPE₀ is massive (NU tables 1 and 2)")
        parts += [f"{model}, computed:\n\n{as_markdown(table)}" for model, table in computed.items()]
        if not any("NU prints" in heading for table in computed.values() for heading in table):  # no model is GPT-2
            parts.append(f"GPT-2, as NU prints it; {NEEDS_GPT2}.\n\n{as_markdown(printed_gamma())}")
    if models_with_routes(card.routes):
        parts += [f"### {ROUTES_TITLE}", as_markdown(routes_text(card.routes))]
    return "\n\n".join(parts)


def unusual(table: pd.DataFrame) -> list[Finding]:
    """Return the claims that fail in a model of a table, or hold in its models alone, with others that decide them.

    The others are those of the table, or for one model those of `reports/claims`.
    """
    ours = outcomes_by_model(table)
    every = ours if len(ours) > 1 else reported() | ours
    findings = []
    for claim in CLAIMS:
        fails = [model for model in every if every[model].get(claim) == Outcome.FAILS]
        holds = [model for model in every if every[model].get(claim) == Outcome.HOLDS]
        if ours.keys() & fails or (fails and holds and ours.keys() >= {*holds}):
            names = {model: "this model" if [model] == [*ours] else model for model in every}
            ends = [(end, models) for end, models in ((Outcome.FAILS, fails), (Outcome.HOLDS, holds)) if models]
            where = "; ".join(f"{end} in {', '.join(names[model] for model in models)}" for end, models in ends)
            sentence = f"{CLAIMS[claim].statement.rstrip('.')}: {where} ({claim})."
            outcome = Outcome.REFUTED if ours.keys() & fails else Outcome.CONFIRMED
            findings.append(Finding("unusual", "What is unusual", outcome, numbers={"claim": claim}, sentence=sentence))
    return findings


def outcomes_by_model(table: pd.DataFrame) -> dict[str, dict[str, str]]:
    """Return model → claim → its outcome."""
    by_model = table[table["part"] == 0].groupby("model", sort=False)
    return {str(model): dict(zip(rows["claim"], rows["outcome"], strict=True)) for model, rows in by_model}


@cache
def reported() -> dict[str, dict[str, str]]:
    """Return the outcomes in reports/claims, by model."""
    return outcomes_by_model(read_table(shipped("reports") / "claims" / "tables" / f"{CLAIM}.parquet", TABLES[CLAIM]))


def _unusual(table: pd.DataFrame) -> list[str]:
    findings = unusual(table)
    return ["What is unusual:", "\n".join(f"- {finding.sentence}" for finding in findings)] if findings else []


def _outcomes(card: Scorecard) -> pd.DataFrame:
    """Return outcomes: rows claims that at least one model decides, with their statements, columns models."""
    wide = card.by_model.fillna(str(Outcome.NOT_MEASURED))
    table = wide[~wide.isin(NOT_JUDGED).all(axis=1)].reset_index()
    table.insert(1, "what it says", [CLAIMS[name].statement for name in table["claim"]])
    return table


def _numbers_of_some(card: Scorecard) -> list[str]:
    """Return the numbers of claims that only one model, or trainings, steps or related models decide."""
    # A single scorecard may lack the latter. Numbers that several models share are listed once.
    of_studies = [name for name, claim in CLAIMS.items() if claim.needs[0].is_study]
    judged = card.table[~card.table["outcome"].isin(NOT_JUDGED)]
    counts = judged.groupby("claim")["model"].nunique()
    rows = judged[judged["claim"].isin([*of_studies, *counts[counts == 1].index])]
    shared: dict[tuple[str, str], list[str]] = {}
    for (model, claim), parts in rows.groupby(["model", "claim"], sort=False):
        shared.setdefault((claim, as_markdown(_printed(parts))), []).append(model)
    sections: dict[tuple[str, ...], list[str]] = {}
    for (claim, _), models in shared.items():
        sections.setdefault(tuple(models), []).append(claim)
    tables = {models: rows[(rows["model"] == models[0]) & rows["claim"].isin(ids)] for models, ids in sections.items()}
    return [f"### {', '.join(models)}\n\n{as_markdown(_printed(numbers))}" for models, numbers in tables.items()]


def scorecard_summary(card: Scorecard, model: str) -> str:
    """Return which claims hold for a model, and how many do not."""
    table = card.table[card.table["model"] == model]
    return "\n\n".join([f"## {model}: {headline(table)}", *_unusual(table), *_summary(table)])


def headline(table: pd.DataFrame) -> str:
    count = len(once(_holding(table, "yes")))
    if count == 1:
        return "1 claim holds, and its null does not pass it"
    return f"{count} claims hold, and their null does not pass them"


def _holding(table: pd.DataFrame, tells: str) -> pd.DataFrame:
    return table[(table["part"] == 0) & (table["outcome"] == Outcome.HOLDS) & (table["tells"] == tells)]


def once(rows: pd.DataFrame) -> list[str]:
    """Return the claims of first parts; those with one number (in all their models) are joined: "W-1 = W-21"."""
    groups: dict[str, set[tuple[Any, ...]]] = {}
    for claim, parts in rows.groupby("claim", sort=False):
        numbers = {*parts[["model", "quantity", "value", "low", "high"]].itertuples(index=False, name=None)}
        name = next((name for name, known in groups.items() if numbers <= known), None)
        if name is not None:
            groups = {f"{key} = {claim}" if key == name else key: known for key, known in groups.items()}
        else:
            groups[str(claim)] = numbers
    return list(groups)


def _summary(table: pd.DataFrame) -> list[str]:
    """Return lists of the claims that hold, by the outcome of their null, and numbers of other and tested claims."""
    first = table[table["part"] == 0]
    groups = {words: once(_holding(table, kind)) for kind, words in KINDS_OF_HOLDING.items()}
    for outcome in UNSHOWN:
        groups[str(outcome).capitalize()] = once(first[first["outcome"] == outcome])
    lines = [f"{words}: {len(ids)} ({', '.join(ids)})" for words, ids in groups.items() if ids]
    counts = Counter(first["outcome"])
    lines.append(", ".join(f"{counts[outcome]} {outcome}" for outcome in NOT_JUDGED if counts[outcome]))
    tested = int((table["low"] < table["high"]).sum())
    chance = f"{counted(tested, 'number was', 'numbers were')} tested, each separately at 95 %: if all truths were at "
    chance += "their thresholds, about "
    chance += f"{(1 - LEVEL) * tested:.0f} of the intervals would miss them by chance."
    return ["\n".join(f"- {line}." for line in lines if line), chance]


def _printed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each number; the first line of a claim also has its statement and outcome."""
    lines = []
    for row in rows.itertuples():
        first = row.part == 0
        value = value_text(row)
        statement = f"{row.statement} {row.quantity[:1].upper()}{row.quantity[1:]}" if first else f"… {row.quantity}"
        note = f" ({row.note})" if row.note else ""
        test = row.test + "‡" * row.is_ours
        outcome = f"**{row.outcome}**" if row.outcome == Outcome.FAILS else row.outcome
        if row.passes == Outcome.NOT_ENOUGH_SEEDS:
            test += f" (power {row.power:.0%})"
        if row.passes in (Outcome.NOT_ENOUGH_SEEDS, Outcome.INCONCLUSIVE) and not isnan(row.seeds_wanted):
            many = f"more than {MOST_SEEDS}" if row.seeds_wanted > MOST_SEEDS else f"{row.seeds_wanted:.0f}"
            test += f"; {many} seeds would decide"
        cells = (statement + note, value, null_text(row, with_share=first), test)
        lines.append((row.claim if first else "", *cells, outcome if first else ""))
    columns = ["claim", "what it says, and what is measured", "value [95 %]", "null", "test", "outcome"]
    return pd.DataFrame(lines, columns=columns)


def _by_reason(rows: pd.DataFrame, outcome: Outcome) -> str:
    chosen = rows[(rows["outcome"] == outcome) & (rows["part"] == 0)]
    return "; ".join(f"{', '.join(group['claim'])} ({reason})" for reason, group in chosen.groupby("note", sort=False))


# --- numbers


def value_text(row: Any) -> str:
    """Return "0.73 [0.70, 0.76]", or only the value if nothing was resampled; the note says why an end is missing."""
    if pd.isna(row.value):
        return f"{MISSING} (not defined)"
    text, low, high = (number_text(row, number) for number in (row.value, row.low, row.high))
    if row.high == inf:
        return f"{text} (no interval)" if row.low in (-inf, 0) else f"{text} [at least {low}]"
    if row.low == -inf:
        return f"{text} [at most {high}]"
    return text if row.low == row.high or pd.isna(row.low) else f"{text} [{low}, {high}]"


def number_text(row: Any, number: float) -> str:
    """Return a number of a claim, with as many digits as tell it from the thresholds that it is compared with."""
    form = _form(row.claim, row.part)
    thresholds = [end for end in (row.least, row.most) if np.isfinite(end) and not np.isclose(end, number, 1e-12)]
    for _ in range(16):  # digits of a float
        if form.format(number) not in map(form.format, thresholds):
            break
        form = re.sub(r"\.(\d+)", lambda digits: f".{int(digits[1]) + 1}", form)
    return form.format(number)


def null_text(row: Any, with_share: bool) -> str:
    """Return "0.73 (0.70 to 0.76)", mean and extremes of the null's draws; `with_share` adds the share that passes."""
    share = ""
    if with_share and row.tells == "no":
        share = f"; {row.null_passes:.0%} pass" if row.null_passes > 0 else "; gives as much"
        if row.claim in CLAIMS and CLAIMS[row.claim].holds_untrained:
            share = "; initial weights pass"
    elif with_share:
        share = {"undefined": " (not defined)", "theorem": " (theorem)"}.get(row.tells, "")
    if pd.isna(row.null):
        return MISSING + share
    mean, least, most = (number_text(row, end) for end in (row.null, row.null_low, row.null_high))
    return (mean if pd.isna(row.null_low) or mean == least == most else f"{mean} ({least} to {most})") + share


def _form(claim: str, part: int) -> str:
    """Return the format string of a number; a claim may be of a plugin that is not loaded."""
    return CLAIMS[claim].parts[part].form if claim in CLAIMS else Part.form
