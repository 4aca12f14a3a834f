"""The runs of one model that claims are judged by, each known by its role, and how claims read their tables."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import pandas as pd

from sinkscope.measuring.random_weights import WEIGHTS_AT_RANDOM
from sinkscope.paper_claims.studies import KINDS as STUDIES
from sinkscope.paper_claims.studies import Study
from sinkscope.results.bos import OPTIONS, WITH, WITHOUT
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Lacks, Sequences

MAIN, NULL = "natural", "null"  # roles: the model as it is, and with random weights (further draws: null_role)
LONG = 256  # tokens of a text that is streamed
RANDOM, REPEATED = OTHER_INPUTS = ("random", "repeated")  # than the text that a model is measured on
WITH_BOS, WITHOUT_BOS = "with-bos", "without-bos"  # kinds of roles: with-bos:natural, without-bos:repeated
POLICIES = {WITH: WITH_BOS, WITHOUT: WITHOUT_BOS}


def null_role(draw: int) -> str:
    """The role of one of the draws of random weights."""
    return f"{NULL}:{draw}" if draw else NULL


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
    """Over texts long enough to lose the first tokens from the window."""
    return run.command == "intervene" and "streaming" in run.tables and run.manifest["input"]["longest"] >= LONG


def _arm(name: str, repeated: bool = False) -> Callable[[RunData], bool]:
    def is_it(run: RunData) -> bool:
        reads = (run.condition == "repeated") == repeated and not (repeated and run.bos == WITH)
        return run.command == "intervene" and reads and label_of(run, name) is not None

    return is_it


def label_of(run: RunData, name: str) -> str | None:
    """Under which label a run of `intervene` has the arm that does this alone, with these parameters; None: it has not.

    An arm that says no more than its label does what that names.
    """
    arms = run.manifest.get("arms", {}).items()
    return next((label for label, arm in arms if arm.get("asked", [label]) == [name]), None)


ROLES: dict[str, Role] = {
    MAIN: Role(_analysis(), "sinkscope analyze {model}"),
    NULL: Role(_analysis(weights_at_random=True), "sinkscope claims {model}"),
    "streaming": Role(_streams, "sinkscope run streaming-perplexity --model {model}"),
}


def _of_length(length: str) -> Role:
    def is_it(run: RunData) -> bool:
        given, natural = run.manifest["config"], ROLES[MAIN].is_it(run)
        return natural and given["seq_len"] == given["window"] == int(length)

    return Role(is_it, f"sinkscope analyze {{model}} --seq-len {length} --window {length} --observables attention")


def _arm_with_loss(name: str) -> Role:
    def is_it(run: RunData) -> bool:
        return "loss_by_sequence" in run.tables and _arm(name)(run)

    return Role(is_it, f"sinkscope intervene {{model}} --do {name}")


def _arm_with_gradients(name: str) -> Role:
    def is_it(run: RunData) -> bool:
        return "gradient" in run.tables and _arm(name)(run)

    return Role(is_it, f"sinkscope intervene {{model}} --do {name} --observables gradient")


def _under_policy(bos: str) -> Callable[[str], Role]:
    """The text that the model is measured on, or drawn tokens, with a BOS in front of each sequence or without."""

    def role(name: str) -> Role:
        words = "" if name == MAIN else f" --input {name}"
        command = f"sinkscope analyze {{model}}{words} --bos {OPTIONS[bos]}"
        return Role(_analysis("" if name == MAIN else name, bos=bos), command)

    return role


# kind → what is behind its colon → the role
KINDS: dict[str, Callable[[str], Role]] = {
    "do": lambda name: Role(_arm(name), f"sinkscope intervene {{model}} --do {name}"),
    "loss-do": _arm_with_loss,
    "gradient-do": _arm_with_gradients,
    # of which the random controls are not needed
    "loss-do-alone": _arm_with_loss,
    "gradient-do-alone": _arm_with_gradients,
    "repeated-do": lambda name: Role(
        _arm(name, repeated=True), f"sinkscope intervene {{model}} --do {name} --input repeated --bos never"
    ),
    **{kind: _under_policy(policy) for policy, kind in POLICIES.items()},
    "length": _of_length,
    "domain": lambda name: Role(_analysis(name), "sinkscope claims {model}"),
}


def role_of(name: str) -> Role:
    """The role of a name: of ROLES, or a kind and what is behind its colon."""
    kind, _, of = name.partition(":")
    return ROLES[name] if name in ROLES else KINDS[kind](of)


def _control(arm: str, draw: int) -> str:
    """As tables name the condition of an arm's random control."""
    return f"{arm} control {draw}"


@dataclass(frozen=True)
class Evidence:
    """Everything that was measured of one model.

    Attributes:
        runs: By role.
        skipped: Role → why it does not apply to this model.
        failed: Role → how its run broke off.
        model: How the model is named in commands.
        studies: Role → runs that play it together (`studies.py`).
        commands: Role → what would make a study that is not there.
        example: A run that says what kind of model this is, where there is none on text.
        others: All runs of the model that there are, with and without a role.
        control: The random control that is in the place of each intervention; None: the intervention itself.
    """

    runs: dict[str, RunData]
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    model: str = "MODEL"
    studies: Mapping[str, Study] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    example: RunData | None = None
    others: tuple[RunData, ...] = ()
    control: int | None = None  # the random control that is in the place of each intervention
    _sequences: dict[tuple[str, str | None], Sequences] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, runs: Iterable[RunData], needs: Iterable[str], model: str = "MODEL") -> "Evidence":
        """Find the runs that play the roles in `needs`; of several the one with most tables."""
        runs = list(runs)
        found: dict[str, RunData] = {}
        skipped: dict[str, str] = {}
        for need in dict.fromkeys(needs):
            if need.partition(":")[0] in STUDIES:
                continue
            fitting = [run for run in runs if role_of(need).is_it(run)]
            if need == NULL:
                by_draw = {null_role(run.manifest.get("draw", 0)): run for run in fitting}
                found |= dict(sorted(by_draw.items()))
                continue
            if fitting:
                found[need] = max(fitting, key=lambda run: len(run.tables))
                continue
            arm = need.partition(":")[2]
            reasons = [run.manifest["skipped"][arm] for run in runs if arm in run.manifest.get("skipped", {})]
            if arm and reasons:
                skipped[need] = reasons[-1]
        return cls(found, skipped, model=model, others=tuple(runs))

    def has(self, role: str) -> bool:
        return role in self.runs or role in self.studies

    def inapplicable(self, role: str) -> str | None:
        """Why there is no such run, where that lies in the model."""
        return self.skipped.get(role)

    def command(self, role: str) -> str:
        """What would measure it, or how it failed."""
        if role in self.failed:
            return f"failed: {self.failed[role]}"
        command = self.commands[role] if role in self.commands else role_of(role).command
        return command.replace("{model}", self.model)

    def run(self, role: str) -> RunData:
        """Raises Lacks: there is none, as there is none of random weights but on text."""
        if role not in self.runs:
            raise Lacks(f"there is no run '{role}'")
        return self.runs[role]

    def table(self, role: str, name: str) -> pd.DataFrame:
        """One table of a run; of a role "do:NAME" the rows of that arm."""
        return self.sequences(role).table(name)

    @property
    def natural(self) -> Sequences:
        """The tables of the model as it is."""
        return self.sequences(MAIN)

    def sequences(self, role: str, condition: str | None = None) -> Sequences:
        """By-sequence tables of a run; of `intervene` those of one arm, by default the role's own."""
        label = self.label(role)
        key = role, (condition or label) if label else None
        if key not in self._sequences:
            self._sequences[key] = Sequences(self.run(role), key[1])
        return self._sequences[key]

    def label(self, role: str) -> str | None:
        """The condition of the arm that a role "do:NAME" is; None for other roles."""
        arm = self._arm(role)
        has_controls = not role.partition(":")[0].endswith("alone")
        return _control(arm, self.control) if arm and has_controls and self.control is not None else arm

    def controls(self, role: str) -> list[str]:
        """The conditions of an arm's random controls; without the one that is in the place of the arm."""
        arm = self._arm(role)
        drawn = self.run(role).manifest["arms"][arm]["controls"]
        return [_control(str(arm), draw) for draw in range(len(drawn)) if draw != self.control]

    def _arm(self, role: str) -> str | None:
        kind, _, name = role.partition(":")
        return label_of(self.run(role), name) if name and kind != NULL else None

    def as_control(self, draw: int) -> "Evidence":
        """A random control in the place of each intervention."""
        return replace(self, control=draw)

    @cached_property
    def nulls(self) -> list["Evidence"]:
        """Each draw of random weights in the place of the model, beside the other draws."""
        runs = [run for role, run in self.runs.items() if role.partition(":")[0] == NULL]
        return [
            Evidence({MAIN: run, **{null_role(at): other for at, other in enumerate(runs[:draw] + runs[draw + 1 :])}})
            for draw, run in enumerate(runs)
        ]

    @property
    def any_run(self) -> RunData:
        """The run on text, where there is one: it says what kind of model this is."""
        known = [*self.runs.values(), *filter(None, [self.example]), *self.others]
        return self.runs.get(MAIN, known[0])
