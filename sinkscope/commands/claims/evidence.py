"""What claims need, how each kind of need is found, measured or made by the user, and access to the tables."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from sinkscope.commands.claims import studies
from sinkscope.commands.claims.studies import ClaimStudy, StudySources
from sinkscope.measuring.observables.over_mixing import SUBSTITUTIONS
from sinkscope.measuring.random_weights import RANDOM_SUFFIX, WEIGHTS_AT_RANDOM
from sinkscope.results.run import BOS_OPTIONS, WITH, WITHOUT, RunData
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.trainings import UNTOUCHED

NATURAL = "natural"  # the text that a model is measured on
LONG_TEXT = 256  # tokens of a text that is streamed, so that the first leave the window
RANDOM, REPEATED = OTHER_INPUTS = ("random", "repeated")
POLICY_KINDS = {WITH: "with-bos", WITHOUT: "without-bos"}
LOSS = "loss_by_sequence"

# observables that claims read from each kind of run; from equal tokens more if there is no BOS
ATTENTION = ("attention",)
OF_EQUAL_TOKENS = ("attention", "geometry", "activation", "equal-tokens")
OF_STATES = ("attention", "massive", "entropy", "sink-tokens", "residual-sinks")
OF_IDENTITIES = ("gradient-identities",)
OF_RANDOM_WEIGHTS = (
    "activation", "attention", "gate", "geometry", "gradient", "massive", "query-bias", "logit-terms", "epe",
    "window-edge", "super-weight", *OF_STATES[2:],
)  # fmt: skip
Measured = TypeVar("Measured", bound=RunData)
Skipped = Mapping[str, Mapping[str, str]]  # model → role → why it does not apply


@dataclass(frozen=True)
class Need:
    """A run of the model, or a study, that a claim reads."""

    kind: str  # a key of `NEED_KINDS`
    of: str = ""  # the intervention, input, number of tokens, draw, methods or factor; "" for a kind without a choice

    @property
    def name(self) -> str:
        """The name of the role in run.json; in the name of a folder, the colon becomes a hyphen."""
        return f"{self.kind}:{self.of}" if self.of else self.kind

    @property
    def record(self) -> "NeedKind":
        return NEED_KINDS[self.kind]

    @property
    def is_study(self) -> bool:
        return self.record.find is not None

    @property
    def has_controls(self) -> bool:
        return self.record.null == Null.CONTROLS


MAIN, NULL = Need("natural"), Need("null")  # unchanged model; random weights (further draws: null_need)
STATES = Need("states")  # the unchanged model, with OF_STATES
IDENTITIES = Need("identities")  # the unchanged model, with OF_IDENTITIES


def null_need(draw: int) -> Need:
    return Need("null", str(draw) if draw else "")


class Null(StrEnum):
    """The kinds of data without the claimed effect, on which the test of a claim should not pass."""

    RANDOM_WEIGHTS = "random weights"  # each draw takes the place of the model, and is judged against the other draws
    CONTROLS = "random controls"  # each random control takes the place of its intervention
    PLAIN = "plain training"  # the plain training of another seed takes the place of the method
    SHUFFLED = "steps in random order"  # of a training
    THEOREM = "theorem"  # or an identity: the claim holds for any weights, and tests the code
    NONE = "none"  # no measured data could take the place


class NeedKind(NamedTuple):
    """All that is known of one kind of need."""

    command: str = ""  # the command that makes a run, with {of} for `Need.of` and {input} for an input other than text
    fits: Callable[[RunData, str], bool] = lambda run, of: False  # whether a run is one for `Need.of`
    null: Null = Null.RANDOM_WEIGHTS  # what claims that need it are set against, unless they name something else
    measure: str = ""  # the method of `ClaimBench` (command.py) that measures it; "": users make the runs
    options: Mapping[str, Any] = {}  # arguments of that method
    run: str = ""  # needs of all kinds with this name are measured in one run; "": a run for each need
    readings: int = 1  # how often each arm reads the input
    table: str = ""  # the table that its run must have
    is_intervention: bool = False
    # of a study: how it is found among all folders, and the command that makes it, both for `Need.of`
    find: Callable[[StudySources, str], ClaimStudy | None] | None = None
    suggest: Callable[[StudySources, str], str] = lambda sources, of: ""


def _analyzed(
    run: RunData, reads: str, at_random: bool = False, bos: str = "", length: int = 0, tables: Iterable[str] = ()
) -> bool:
    """Return whether a run of `analyze` reads an input and has random weights, or the model's, and this BOS policy."""
    # NATURAL is any text, including the user's own and sampled text. An empty `bos` accepts both policies.
    on_input = run.condition not in OTHER_INPUTS if reads == NATURAL else run.condition == reads
    has_weights = (run.manifest["model"].get("weights") == WEIGHTS_AT_RANDOM) == at_random
    if not (run.command == "analyze" and on_input and has_weights and bos in ("", run.bos)):
        return False
    config = run.manifest["config"]
    return set(tables) <= set(run.tables) and (not length or config["seq_len"] == config["window"] == length)


def _streamed(run: RunData, of: str) -> bool:
    return run.command == "intervene" and "streaming" in run.tables and run.manifest["input"]["longest"] >= LONG_TEXT


def _has_arm(run: RunData, name: str, table: str = "", repeated: bool = False) -> bool:
    if run.command != "intervene" or (table and table not in run.tables):
        return False
    reads = (run.condition == REPEATED) == repeated and not (repeated and run.bos == WITH)
    return reads and label_of(run, name) is not None


def label_of(run: RunData, name: str) -> str | None:
    """Return the label of the arm that consists of only this intervention with these parameters, or None."""
    return next((label for label, arm in run.manifest["arms"].items() if arm["asked"] == [name]), None)


def _arms(
    run: str, flags: str = "", table: str = "", alone: bool = False, readings: int = 1, **options: Any
) -> NeedKind:
    """Return a kind of interventions, which have random controls unless they are `alone`."""
    fits = partial(_has_arm, table=table, repeated=options.get("input") == REPEATED)
    null = Null.NONE if alone else Null.CONTROLS
    command = f"sinkscope intervene {{model}} --do {{of}}{flags}"
    return NeedKind(command, fits, null, "arms", options, run, readings, table, is_intervention=True)


def _with_bos(policy: str) -> NeedKind:
    repeated = OF_EQUAL_TOKENS if policy == WITHOUT else ATTENTION
    observables = {NATURAL: ("attention", "activation", "massive"), RANDOM: ATTENTION, REPEATED: repeated}
    return NeedKind(
        f"sinkscope analyze {{model}}{{input}} --bos {BOS_OPTIONS[policy]}",
        partial(_analyzed, bos=policy),
        measure="under_policy",
        options={"policy": policy, "observables": observables},
    )


def _study(
    find: Callable[..., ClaimStudy | None], suggest: Callable[..., str], null: Null = Null.NONE, **options: Any
) -> NeedKind:
    return NeedKind(null=null, find=partial(find, **options), suggest=partial(suggest, **options))


_arms_of_training = partial(_study, studies.find_arms, studies.train_arms, Null.PLAIN)


_GRADIENT: dict[str, Any] = {
    "flags": " --observables gradient",
    "table": "gradient",
    "observables": ("gradient",),
    "draws": 2,
}
NEED_KINDS = {
    "natural": NeedKind("sinkscope analyze {model}", lambda run, _: _analyzed(run, NATURAL)),
    "null": NeedKind("sinkscope claims {model}", lambda run, _: _analyzed(run, NATURAL, at_random=True),
        measure="null", options={"observables": OF_RANDOM_WEIGHTS}),
    "states": NeedKind(f"sinkscope analyze {{model}} --observables {','.join(OF_STATES)}",
        lambda run, _: _analyzed(run, NATURAL, tables=("entropy", "sink_tokens", "spikes")),
        measure="states", options={"observables": OF_STATES}),
    "identities": NeedKind(f"sinkscope analyze {{model}} --observables {','.join(OF_IDENTITIES)}",
        lambda run, _: _analyzed(run, NATURAL, tables=("gradient_identity",)),
        measure="states", options={"observables": OF_IDENTITIES}),
    "with-bos": _with_bos(WITH),
    "without-bos": _with_bos(WITHOUT),
    "domain": NeedKind("sinkscope claims {model}", _analyzed, measure="domain", options={"observables": ATTENTION}),
    "length": NeedKind("sinkscope analyze {model} --seq-len {of} --window {of} --observables attention",
        lambda run, of: _analyzed(run, NATURAL, length=int(of)),
        measure="length", options={"observables": ATTENTION}),
    "do": _arms("do"),
    "loss-do": _arms("do", table=LOSS),
    "loss-do-alone": _arms("do", table=LOSS, alone=True),
    "gradient-do": _arms("gradient-do", **_GRADIENT),
    "gradient-do-alone": _arms("gradient-do", alone=True, **_GRADIENT),
    "mixing-do": _arms("mixing-do", " --observables over-mixing", "over_mixing_by_sequence",
        readings=1 + SUBSTITUTIONS, observables=("over-mixing",)),
    "repeated-do": _arms("repeated-do", " --input repeated --bos never",
        input=REPEATED, dataset=None, prompt=None, bos="never"),
    "streaming": NeedKind("sinkscope run streaming-perplexity {model}", _streamed, measure="streamed"),
    "arms": _arms_of_training(),  # arms:none,vga
    "retrofit": _arms_of_training(command="retrofit"),
    "train": _arms_of_training(command="train"),
    "backcopy": _arms_of_training(command="train", text="bigram-backcopy"),
    "factor": _study(studies.find_levels, studies.vary),  # factor:weight-decay
    "steps": _study(studies.find_steps, studies.measure_steps),
    "course": _study(studies.find_steps, studies.measure_steps, logged=True),  # only the sink rate, which is logged
    "sizes": _study(studies.find_sizes, studies.measure_sizes),
    "scores": _study(studies.find_sizes, studies.measure_sizes, scored=True),  # scores:hellaswag
    "base": _study(studies.find_base, studies.analyze_base),
}  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """The runs of one model, and its studies."""

    runs: dict[Need, RunData]
    skipped: dict[str, str] = field(default_factory=dict)  # role's name → why it does not apply to this model
    failed: dict[str, str] = field(default_factory=dict)  # role's name → the error of its run
    model: str = "MODEL"  # name of the model in commands
    studies: Mapping[Need, ClaimStudy] = field(default_factory=dict)
    commands: Mapping[Need, str] = field(default_factory=dict)  # study that was not found → command that makes it
    example: RunData | None = None  # a run that describes the model, if there is no run on text
    others: tuple[RunData, ...] = ()  # all runs of the model, needed or not
    control: int | None = None  # the random control that replaces each intervention; None: the intervention itself
    _sequences: dict[tuple[Need, str | None], Sequences] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, runs: Iterable[RunData], needs: Iterable[Need], model: str = "MODEL") -> "Evidence":
        """Find the needed runs; if there are several, take the run with the most tables."""
        runs = list(runs)
        chosen: dict[Need, RunData] = {}
        skipped: dict[str, str] = {}
        for need in dict.fromkeys(needs):
            fitting = [run for run in runs if need.record.fits(run, need.of)]
            fitting.sort(key=lambda run: -len(run.tables))
            if need == NULL:
                by_draw = {null_need(run.manifest.get("draw", 0)): run for run in reversed(fitting)}
                chosen |= dict(sorted(by_draw.items(), key=lambda item: item[0].name))
            elif fitting:
                chosen[need] = fitting[0]
            for run in () if fitting or need.is_study else runs:
                if need.of in run.manifest.get("skipped", {}):
                    skipped[need.name] = run.manifest["skipped"][need.of]
        return cls(chosen, skipped, model=model, others=tuple(runs))

    def with_studies(self, sources: StudySources, needs: Iterable[Need]) -> "Evidence":
        """Return it with the studies that are found, and for each missing study the command that makes it."""
        chosen: dict[Need, ClaimStudy] = {}
        commands: dict[Need, str] = {}
        for need in dict.fromkeys(needs):
            kind = need.record
            if kind.find is None:
                continue
            methods = studies.split_arms(need.of) if kind.null == Null.PLAIN else []
            has_variants = any(":" not in arm and arm not in (studies.PLAIN, UNTOUCHED) for arm in methods)
            if (sources.variant == 0 or has_variants) and (study := kind.find(sources, need.of)):
                chosen[need] = study
            else:
                commands[need] = kind.suggest(sources, need.of)
        return replace(self, studies=chosen, commands=commands)

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
            source = "" if role.of == NATURAL else f" --input {role.of}"
            command = role.record.command.replace("{input}", source).replace("{of}", role.of)
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
        """Return the condition of an intervention's arm, or of the control that replaces it; None for other runs."""
        arm = label_of(self.run(role), role.of) if role.record.is_intervention else None
        return f"{arm} control {self.control}" if arm and role.has_controls and self.control is not None else arm

    def controls(self, role: Need) -> list[str]:
        """Return the conditions of the random controls of an arm, except for the control that replaces the arm."""
        run = self.run(role)
        arm = label_of(run, role.of)
        drawn = run.manifest["arms"][arm]["controls"]
        return [f"{arm} control {draw}" for draw in range(len(drawn)) if draw != self.control]

    @cached_property
    def nulls(self) -> list["Evidence"]:
        """For each draw of random weights, the evidence with this draw as the model and the other draws as nulls."""
        draws = [run for role, run in self.runs.items() if role.kind == NULL.kind]
        evidence = []
        for draw, run in enumerate(draws):
            others = {null_need(number): other for number, other in enumerate(draws[:draw] + draws[draw + 1 :])}
            evidence.append(Evidence({MAIN: run, STATES: run, **others}))
        return evidence

    @property
    def any_run(self) -> RunData:
        """The run on text, or else another run, which describes the model."""
        describing = [*self.runs.values(), *filter(None, [self.example]), *self.others]
        return self.runs.get(MAIN, describing[0])


def models_of(runs: Iterable[Measured]) -> dict[str, list[Measured]]:
    """Group runs by model, in order. Runs on random weights belong to the model of the same architecture."""
    by_model: dict[str, list[Measured]] = {}
    for run in runs:
        by_model.setdefault(run.model.removesuffix(RANDOM_SUFFIX), []).append(run)
    return by_model
