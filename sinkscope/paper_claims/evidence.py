"""The runs of one model that claims are judged by, found among all that was given, and how claims read them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import pandas as pd

from sinkscope.measuring.random_weights import WEIGHTS_AT_RANDOM
from sinkscope.paper_claims.need import Kind, Need
from sinkscope.paper_claims.studies import Study
from sinkscope.results.run import BOS_OPTIONS, WITH, WITHOUT, RunData
from sinkscope.results.sequences import Lacks, Sequences

NATURAL = "natural"  # the text that a model is measured on
MAIN, NULL = Need("natural"), Need("null")  # the model as it is, and with random weights (further draws: null_need)
LONG = 256  # tokens of a text that is streamed
RANDOM, REPEATED = OTHER_INPUTS = ("random", "repeated")
POLICIES: dict[str, Kind] = {WITH: "with-bos", WITHOUT: "without-bos"}


def null_need(draw: int) -> Need:
    """One of the draws of random weights."""
    return Need("null", str(draw) if draw else "")


class Role(NamedTuple):
    """A run that claims need: how it is recognized, and the command that makes it."""

    is_it: Callable[[RunData], bool]
    command: str


def _analysis(
    condition: str = "", weights_at_random: bool = False, bos: str | None = None
) -> Callable[[RunData], bool]:
    """Recognize runs of `analyze` on an input.

    Args:
        condition: the input; "" for any text, including the user's own and text sampled from the model.
        weights_at_random: whether the weights are random.
        bos: accept only runs with, or only runs without, a BOS at position 0.
    """

    def is_it(run: RunData) -> bool:
        at_random = run.manifest["model"].get("weights") == WEIGHTS_AT_RANDOM
        reads = run.condition == condition if condition else run.condition not in OTHER_INPUTS
        begins = bos is None or run.bos == bos
        return run.command == "analyze" and reads and begins and at_random == weights_at_random

    return is_it


def _streams(run: RunData) -> bool:
    """Recognize runs that streamed texts long enough for the first tokens to leave the window."""
    return run.command == "intervene" and "streaming" in run.tables and run.manifest["input"]["longest"] >= LONG


def _arm(name: str, repeated: bool = False, table: str | None = None) -> Callable[[RunData], bool]:
    """Recognize runs of `intervene` that have an intervention as an arm. `table`: which they need to have."""

    def is_it(run: RunData) -> bool:
        reads = (run.condition == "repeated") == repeated and not (repeated and run.bos == WITH)
        has_table = table is None or table in run.tables
        return run.command == "intervene" and reads and has_table and label_of(run, name) is not None

    return is_it


def label_of(run: RunData, name: str) -> str | None:
    """Return the label of the arm of a run of `intervene` that does only this, with these parameters, or None.

    In older runs an arm without the entry `asked` does what its label names.
    """
    arms = run.manifest.get("arms", {}).items()
    return next((label for label, arm in arms if arm.get("asked", [label]) == [name]), None)


def _of_length(length: str) -> Role:
    def is_it(run: RunData) -> bool:
        given, natural = run.manifest["config"], role_of(MAIN).is_it(run)
        return natural and given["seq_len"] == given["window"] == int(length)

    return Role(is_it, f"sinkscope analyze {{model}} --seq-len {length} --window {length} --observables attention")


def _under_policy(bos: str) -> Callable[[str], Role]:
    """The text or drawn tokens, with or without a BOS in front of each sequence."""

    def role(name: str) -> Role:
        words = "" if name == NATURAL else f" --input {name}"
        command = f"sinkscope analyze {{model}}{words} --bos {BOS_OPTIONS[bos]}"
        return Role(_analysis("" if name == NATURAL else name, bos=bos), command)

    return role


def _arm_role(accepts: Callable[[str], Callable[[RunData], bool]], options: str = "") -> Callable[[str], Role]:
    return lambda name: Role(accepts(name), f"sinkscope intervene {{model}} --do {name}{options}")


# kind → `Need.of` → the role
KINDS: dict[Kind, Callable[[str], Role]] = {
    "natural": lambda _: Role(_analysis(), "sinkscope analyze {model}"),
    "null": lambda _: Role(_analysis(weights_at_random=True), "sinkscope claims {model}"),
    "streaming": lambda _: Role(_streams, "sinkscope run streaming-perplexity --model {model}"),
    "do": _arm_role(_arm),
    "loss-do": _arm_role(partial(_arm, table="loss_by_sequence")),
    "gradient-do": _arm_role(partial(_arm, table="gradient"), " --observables gradient"),
    "repeated-do": _arm_role(partial(_arm, repeated=True), " --input repeated --bos never"),
    "loss-do-alone": _arm_role(partial(_arm, table="loss_by_sequence")),
    "gradient-do-alone": _arm_role(partial(_arm, table="gradient"), " --observables gradient"),
    "with-bos": _under_policy(WITH),
    "without-bos": _under_policy(WITHOUT),
    "length": _of_length,
    "domain": lambda name: Role(_analysis(name), "sinkscope claims {model}"),
}


def role_of(need: Need) -> Role:
    """How a need's run is recognized and made."""
    return KINDS[need.kind](need.of)


def _control(arm: str, draw: int) -> str:
    """Return the condition under which tables have an arm's random control."""
    return f"{arm} control {draw}"


@dataclass(frozen=True)
class Evidence:
    """Everything that was measured of one model.

    Attributes:
        runs: The runs that were found.
        skipped: Role's name → why it does not apply to this model.
        failed: Role's name → how its run broke off.
        model: How the model is named in commands.
        studies: The studies that were found (`studies.py`).
        commands: The command that would make each study that was not found.
        example: A run that says what kind of model this is, if there is none on text.
        others: All runs of the model, needed or not.
        control: The random control that replaces each intervention; None: the intervention itself.
    """

    runs: dict[Need, RunData]
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    model: str = "MODEL"
    studies: Mapping[Need, Study] = field(default_factory=dict)
    commands: Mapping[Need, str] = field(default_factory=dict)
    example: RunData | None = None
    others: tuple[RunData, ...] = ()
    control: int | None = None
    _sequences: dict[tuple[Need, str | None], Sequences] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, runs: Iterable[RunData], needs: Iterable[Need], model: str = "MODEL") -> "Evidence":
        """Find the runs that are needed; among several the one with most tables."""
        runs = list(runs)
        found: dict[Need, RunData] = {}
        skipped: dict[str, str] = {}
        for need in dict.fromkeys(needs):
            if need.is_study:
                continue
            fitting = [run for run in runs if role_of(need).is_it(run)]
            if need == NULL:
                by_draw = {null_need(run.manifest.get("draw", 0)): run for run in fitting}
                found |= dict(sorted(by_draw.items(), key=lambda item: item[0].name))
                continue
            if fitting:
                found[need] = max(fitting, key=lambda run: len(run.tables))
                continue
            arm = need.of
            reasons = [run.manifest["skipped"][arm] for run in runs if arm in run.manifest.get("skipped", {})]
            if arm and reasons:
                skipped[need.name] = reasons[-1]
        return cls(found, skipped, model=model, others=tuple(runs))

    def has(self, role: Need) -> bool:
        return role in self.runs or role in self.studies

    def inapplicable(self, role: Need) -> str | None:
        """Return why the model cannot have such a run, or None."""
        return self.skipped.get(role.name)

    def command(self, role: Need) -> str:
        """Return the command that would measure it, or how it failed."""
        if role.name in self.failed:
            return f"failed: {self.failed[role.name]}"
        command = self.commands[role] if role in self.commands else role_of(role).command
        return command.replace("{model}", self.model)

    def run(self, role: Need) -> RunData:
        """Return a run. Raises Lacks: there is none; random weights, for one, are measured on text only."""
        if role not in self.runs:
            raise Lacks(f"there is no run '{role.name}'")
        return self.runs[role]

    def table(self, role: Need, name: str) -> pd.DataFrame:
        """One table of a run; of an intervention the rows of its arm."""
        return self.sequences(role).table(name)

    @property
    def natural(self) -> Sequences:
        """The tables of the model as it is."""
        return self.sequences(MAIN)

    def sequences(self, role: Need, condition: str | None = None) -> Sequences:
        """Return the tables of a run; for an intervention those of its arm, or of another `condition`."""
        label = self.label(role)
        key = role, (condition or label) if label else None
        if key not in self._sequences:
            self._sequences[key] = Sequences(self.run(role), key[1])
        return self._sequences[key]

    def label(self, role: Need) -> str | None:
        """The condition of an intervention's arm; None for other runs."""
        arm = self._arm(role)
        return _control(arm, self.control) if arm and role.has_controls and self.control is not None else arm

    def controls(self, role: Need) -> list[str]:
        """Return the conditions of an arm's random controls, except for the one that replaces the arm."""
        arm = self._arm(role)
        drawn = self.run(role).manifest["arms"][arm]["controls"]
        return [_control(str(arm), draw) for draw in range(len(drawn)) if draw != self.control]

    def _arm(self, role: Need) -> str | None:
        return label_of(self.run(role), role.of) if role.is_intervention else None

    def as_control(self, draw: int) -> "Evidence":
        """Replace each intervention by one of its random controls."""
        return replace(self, control=draw)

    @cached_property
    def nulls(self) -> list["Evidence"]:
        """For each draw of random weights the evidence in which it replaces the model, and the others are nulls."""
        runs = [run for role, run in self.runs.items() if role.kind == NULL.kind]
        return [
            Evidence({MAIN: run, **{null_need(at): other for at, other in enumerate(runs[:draw] + runs[draw + 1 :])}})
            for draw, run in enumerate(runs)
        ]

    @property
    def any_run(self) -> RunData:
        """The run on text if there is one, else another run: it says what kind of model this is."""
        known = [*self.runs.values(), *filter(None, [self.example]), *self.others]
        return self.runs.get(MAIN, known[0])
