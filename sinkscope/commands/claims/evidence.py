"""The runs of one model that claims read, found among all given runs, and access to their tables."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from sinkscope.commands.claims.studies import OF_STATES, Kind, Need, Study
from sinkscope.measuring.random_weights import WEIGHTS_AT_RANDOM
from sinkscope.results.run import BOS_OPTIONS, WITH, WITHOUT, RunData
from sinkscope.results.sequences import Lacks, Sequences

NATURAL = "natural"  # the text that a model is measured on
MAIN, NULL = Need("natural"), Need("null")  # unchanged model; random weights (further draws: null_need)
STATES = Need("states")  # the unchanged model, with OF_STATES
LONG = 256  # tokens of a text that is streamed, so that the first leave the window
RANDOM, REPEATED = OTHER_INPUTS = ("random", "repeated")
POLICIES: dict[str, Kind] = {WITH: "with-bos", WITHOUT: "without-bos"}


def null_need(draw: int) -> Need:
    return Need("null", str(draw) if draw else "")


# --- how runs are recognized


def _analyzed(run: RunData, reads: str = NATURAL, at_random: bool = False, bos: str = "") -> bool:
    """Return whether a run of `analyze` reads an input and has random weights, or the model's, and this BOS policy."""
    # NATURAL is any text, including the user's own and sampled text. An empty `bos` accepts both policies.
    on_input = run.condition not in OTHER_INPUTS if reads == NATURAL else run.condition == reads
    has_weights = (run.manifest["model"].get("weights") == WEIGHTS_AT_RANDOM) == at_random
    return run.command == "analyze" and on_input and has_weights and bos in ("", run.bos)


def _of_length(run: RunData, length: str) -> bool:
    config = run.manifest["config"]
    return _analyzed(run) and config["seq_len"] == config["window"] == int(length)


def _streamed(run: RunData, _: str) -> bool:
    return run.command == "intervene" and "streaming" in run.tables and run.manifest["input"]["longest"] >= LONG


def _has_arm(run: RunData, name: str, table: str = "", repeated: bool = False) -> bool:
    if run.command != "intervene" or (table and table not in run.tables):
        return False
    reads = (run.condition == REPEATED) == repeated and not (repeated and run.bos == WITH)
    return reads and label_of(run, name) is not None


def label_of(run: RunData, name: str) -> str | None:
    """Return the label of the arm that consists of only this intervention with these parameters, or None."""
    # In older runs, an arm without the entry `asked` is the intervention that its label names.
    arms = run.manifest.get("arms", {}).items()
    return next((label for label, arm in arms if arm.get("asked", [label]) == [name]), None)


_INPUT, _DO = "sinkscope analyze {model}{input}", "sinkscope intervene {model} --do {of}"
_WITH_LOSS = partial(_has_arm, table="loss_by_sequence"), _DO
_WITH_GRADIENT = partial(_has_arm, table="gradient"), f"{_DO} --observables gradient"

# kind → whether a run is one for `Need.of`, and the command that makes it, with {of} for `Need.of`
KINDS: dict[Kind, tuple[Callable[[RunData, str], bool], str]] = {
    "natural": (lambda run, _: _analyzed(run), "sinkscope analyze {model}"),
    "null": (lambda run, _: _analyzed(run, at_random=True), "sinkscope claims {model}"),
    "streaming": (_streamed, "sinkscope run streaming-perplexity --model {model}"),
    "do": (_has_arm, _DO),
    "loss-do": _WITH_LOSS,
    "loss-do-alone": _WITH_LOSS,
    "gradient-do": _WITH_GRADIENT,
    "gradient-do-alone": _WITH_GRADIENT,
    "mixing-do": (partial(_has_arm, table="over_mixing_by_sequence"), f"{_DO} --observables over-mixing"),
    "repeated-do": (partial(_has_arm, repeated=True), f"{_DO} --input repeated --bos never"),
    "with-bos": (partial(_analyzed, bos=WITH), f"{_INPUT} --bos {BOS_OPTIONS[WITH]}"),
    "without-bos": (partial(_analyzed, bos=WITHOUT), f"{_INPUT} --bos {BOS_OPTIONS[WITHOUT]}"),
    "length": (_of_length, "sinkscope analyze {model} --seq-len {of} --window {of} --observables attention"),
    "domain": (_analyzed, "sinkscope claims {model}"),
    "states": (
        lambda run, _: _analyzed(run) and {"entropy", "sink_tokens", "spikes"} <= set(run.tables),
        f"sinkscope analyze {{model}} --observables {','.join(OF_STATES)}",
    ),
}


@dataclass(frozen=True)
class Evidence:
    runs: dict[Need, RunData]
    skipped: dict[str, str] = field(default_factory=dict)  # role's name → why it does not apply to this model
    failed: dict[str, str] = field(default_factory=dict)  # role's name → the error of its run
    model: str = "MODEL"  # name of the model in commands
    studies: Mapping[Need, Study] = field(default_factory=dict)
    commands: Mapping[Need, str] = field(default_factory=dict)  # study that was not found → command that makes it
    example: RunData | None = None  # a run that describes the model, if there is no run on text
    others: tuple[RunData, ...] = ()  # all runs of the model, needed or not
    control: int | None = None  # the random control that replaces each intervention; None: the intervention itself
    _sequences: dict[tuple[Need, str | None], Sequences] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, runs: Iterable[RunData], needs: Iterable[Need], model: str = "MODEL") -> "Evidence":
        """Find the needed runs; if there are several, take the run with the most tables."""
        runs = list(runs)
        found: dict[Need, RunData] = {}
        skipped: dict[str, str] = {}
        for need in dict.fromkeys(needs):
            if need.is_study:
                continue
            fits, _ = KINDS[need.kind]
            fitting = [run for run in runs if fits(run, need.of)]
            if need == NULL:
                by_draw = {null_need(run.manifest.get("draw", 0)): run for run in fitting}
                found |= dict(sorted(by_draw.items(), key=lambda item: item[0].name))
            elif fitting:
                found[need] = max(fitting, key=lambda run: len(run.tables))
            for run in () if fitting else runs:
                if need.of in run.manifest.get("skipped", {}):
                    skipped[need.name] = run.manifest["skipped"][need.of]
        return cls(found, skipped, model=model, others=tuple(runs))

    def has(self, role: Need) -> bool:
        return role in self.runs or role in self.studies

    def inapplicable(self, role: Need) -> str | None:
        return self.skipped.get(role.name)

    def command(self, role: Need) -> str:
        """Return the command that would measure the run, or the error with which it failed."""
        if role.name in self.failed:
            return f"failed: {self.failed[role.name]}"
        command = self.commands.get(role)
        if command is None:
            given = "" if role.of == NATURAL else f" --input {role.of}"
            command = KINDS[role.kind][1].replace("{input}", given).replace("{of}", role.of)
        return command.replace("{model}", self.model)

    def run(self, role: Need) -> RunData:
        """Return a run. Raises Lacks if it is missing; for example, random weights are measured only on text."""
        if role not in self.runs:
            raise Lacks(f"there is no run '{role.name}'")
        return self.runs[role]

    @property
    def natural(self) -> Sequences:
        return self.sequences(MAIN)

    def sequences(self, role: Need, condition: str | None = None) -> Sequences:
        """Return the tables of a run; for an intervention, the tables of its arm or of another `condition`."""
        label = self.label(role)
        key = role, label and (condition or label)
        if key not in self._sequences:
            self._sequences[key] = Sequences(self.run(role), key[1])
        return self._sequences[key]

    def label(self, role: Need) -> str | None:
        """Return the condition of an intervention's arm; None for other runs."""
        arm = self._arm(role)
        return f"{arm} control {self.control}" if arm and role.has_controls and self.control is not None else arm

    def controls(self, role: Need) -> list[str]:
        """Return the conditions of the random controls of an arm, except for the control that replaces the arm."""
        arm = self._arm(role)
        drawn = self.run(role).manifest["arms"][arm]["controls"]
        return [f"{arm} control {draw}" for draw in range(len(drawn)) if draw != self.control]

    def _arm(self, role: Need) -> str | None:
        return label_of(self.run(role), role.of) if role.is_intervention else None

    @cached_property
    def nulls(self) -> list["Evidence"]:
        """For each draw of random weights, the evidence with this draw as the model and the other draws as nulls."""
        runs = [run for role, run in self.runs.items() if role.kind == NULL.kind]
        others = [runs[:draw] + runs[draw + 1 :] for draw in range(len(runs))]
        return [
            Evidence({MAIN: run, STATES: run} | {null_need(at): other for at, other in enumerate(rest)})
            for run, rest in zip(runs, others, strict=True)
        ]

    @property
    def any_run(self) -> RunData:
        """The run on text, or else another run, which describes the model."""
        known = [*self.runs.values(), *filter(None, [self.example]), *self.others]
        return self.runs.get(MAIN, known[0])
