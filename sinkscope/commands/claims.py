"""`claims`: what papers say happens, tested on a model: measured where runs lack it, then judged from their tables."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.commands.claims_folder import ScorecardFolder, scorecard_folder
from sinkscope.commands.evidence import Collection, collected, judged_folders, merged, skipped_in
from sinkscope.commands.result import Result
from sinkscope.errors import InputError, SinkscopeError, one_line
from sinkscope.interventions import Target, parse, parse_all
from sinkscope.measuring.console import print_line, print_notices, print_part
from sinkscope.measuring.experiment import Experiment
from sinkscope.measuring.measure import Facts, make_manifest, measure
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.processes import together
from sinkscope.measuring.random_weights import random_weights
from sinkscope.measuring.subject import (
    ModelLike,
    Subject,
    check_config,
    inputs_for,
    is_in_memory,
    open_subject,
    options_of,
    position_limit,
)
from sinkscope.models.in_memory import fingerprint
from sinkscope.options.measuring import AnalyzeOptions, ClaimsOptions, InterveneOptions, RunConfig
from sinkscope.options.output import OutputOptions
from sinkscope.output.result import both, figure_failure
from sinkscope.output.run import Run
from sinkscope.paper_claims.evidence import LONG, MAIN, NATURAL, NULL, POLICIES, RANDOM, REPEATED, Evidence, null_need
from sinkscope.paper_claims.need import ALONE, Need
from sinkscope.paper_claims.register import CLAIMS
from sinkscope.paper_claims.routes import ROLES as ROUTE_ROLES
from sinkscope.paper_claims.routes import routes_of_models
from sinkscope.paper_claims.table import evidence_of, judged, models_of
from sinkscope.results.manifest import make_manifest as make_folder_manifest
from sinkscope.results.run import BOS_OPTIONS, WITHOUT, RunData
from sinkscope.results.scorecard import COMMAND, TABLES
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.verdict.scorecard import Scorecard

STREAMED, KEPT = "streaming-window:window=64", (0, 1, 2, 4)  # first tokens
STREAM = 512  # tokens of a text that is streamed, where the model takes so many
STREAMS = 8  # such texts, over which intervals are
# what claims read of each input besides the model as it is; of equal tokens more where no BOS is in front
OF_INPUTS = {NATURAL: ("attention", "activation", "massive"), RANDOM: ("attention",), REPEATED: ("attention",)}
OF_EQUAL_TOKENS = ("attention", "geometry", "activation", "equal-tokens")
# of random weights: what claims read of them, without what follows other observables and draws pictures
OF_NULL = (
    "activation", "attention", "gate", "geometry", "gradient", "massive", "query-bias", "logit-terms", "epe",
    "window-edge",
)  # fmt: skip


def command(options: ClaimsOptions, output: OutputOptions) -> Result:
    card = claims(options.model, config=options, **output.where)
    failed = card.manifest["failed"]
    failure = "; ".join(f"{role}: {reason}" for role, reason in failed.items())
    failure = both(failure and f"could not be measured: {failure}", figure_failure(card.manifest))
    return Result(card, card.markdown, folder=output.out, failure=failure)


def check(options: ClaimsOptions) -> None:
    """Find what is wrong with the options of a sweep before a model is loaded. Raises: InputError."""
    check_config(options)


def claims(
    model: ModelLike = None,
    *,
    runs: Iterable[Run] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: ClaimsOptions | None = None,
    page: bool = True,
    **options: Any,
) -> Scorecard:
    """Judge what papers say happens by one model, or by the runs of several.

    Args:
        model: as for `analyze`; with `runs` or `from_` and no model, nothing is measured.
        runs: what was measured before, besides the folders in the option `from_`.
        tokenizer, quiet: as for `analyze`.
        out: the folder to write. The same call again goes on where it was broken off; other options are refused.
        overwrite: begin anew, and replace what is in `out`.
        config: all options at once, in place of `options`.
        page: also write index.html.
        **options: `from_`, `draws` (random controls of each intervention), and those of `analyze`.

    Raises:
        InputError: an option or the input is wrong, or there is nothing to judge; nothing was written.
        SinkscopeError: the model as it is could not be measured.
    """
    start = time.time()
    config = config or options_of(ClaimsOptions, model, options)
    given = judged_folders(config.from_)
    known, skipped = collected(runs, given), skipped_in(given)
    check_config(config)
    judges_only = model is None and (config.only_judges or bool(known.runs and config.model is None))
    reads = (config.model, config.adapter, config.input, *config.from_)
    with (
        together(config.device_map, is_in_memory(model)) as members,
        scorecard_folder(
            members.only_first(out), config.model_dump(mode="json"), start, overwrite, reads, page
        ) as kept,
    ):
        console = members.console(quiet)
        if judges_only:
            if kept is not None:
                kept.begin()
            card = _scorecard(known.evidence(skipped), config, start)
        else:
            with open_subject(model, tokenizer, config, console) as subject:
                name = subject.loaded.name
                _notice_of_others(known, name, console)
                before = members.of_the_first(partial(_begun, kept, subject))
                known, skipped = replace(known, runs=[*known.runs, *before[0]]), merged(skipped, before[1])
                measured = Bench(subject, config, console, known.runs, before[0], kept).evidence(skipped)
                card = _scorecard(known.completed(measured, name), config, start)
        return card if kept is None else kept.finish(card)


def _begun(kept: ScorecardFolder | None, subject: Subject) -> tuple[list[Run], dict[str, dict[str, str]]]:
    """The runs that an earlier session has measured of this model on this text, and the roles that do not apply."""
    if kept is None:
        return [], {}
    kept.begin(input_sha256=subject.inputs.sha256, weights_sha256=fingerprint(subject.loaded.model))
    return kept.runs, kept.skipped


def _notice_of_others(known: Collection, name: str, console: Console) -> None:
    """Where none of the runs that were given is of the model that is measured."""
    models = models_of(known.runs)
    if models and name not in models:
        print_notices(console, [f"the runs given are of {', '.join(models)}: none is of {name}, and all is measured"])


def _scorecard(evidence: Mapping[str, Evidence], config: ClaimsOptions, start: float) -> Scorecard:
    table = pd.concat([judged(one, name) for name, one in evidence.items()], ignore_index=True)
    used = {name: _used(one) for name, one in evidence.items()}
    failed = {role: reason for one in evidence.values() for role, reason in one.failed.items()}
    manifest = make_folder_manifest(
        COMMAND,
        config.model_dump(mode="json"),
        start,
        TABLES,
        judged=used,
        failed=failed,
        skipped_roles={name: one.skipped for name, one in evidence.items()},
    )
    runs = {name: {role.name: run for role, run in one.runs.items()} for name, one in evidence.items()}
    return Scorecard(manifest, table, routes_of_models(evidence), runs)


def _used(evidence: Evidence) -> dict[str, str]:
    """Role → where its runs stand."""
    runs = {role.name: _source(run.folder) for role, run in evidence.runs.items()}
    return runs | {role.name: "; ".join(map(_source, study.folders)) for role, study in evidence.studies.items()}


def _source(folder: Path | None) -> str:
    return "measured" if folder is None else str(folder)


@dataclass
class Bench:
    """One model, and the runs that its claims need: those that are known, and the others measured one by one."""

    subject: Subject
    config: ClaimsOptions
    console: Console
    known: Sequence[RunData]
    earlier: Sequence[RunData] = ()  # those of them that the same call has measured before it was broken off
    kept: ScorecardFolder | None = None  # where runs are written as soon as they are measured
    analyzed: RunData | None = None  # the model as it is, where the same call has measured it
    interrupt: BaseException | None = None  # that ended an experiment of which some arms were finished
    skipped: dict[str, str] = field(default_factory=dict)  # role → why it does not apply
    failed: dict[str, str] = field(default_factory=dict)  # role → how its run broke off

    def evidence(self, skipped: Mapping[str, Mapping[str, str]]) -> Evidence:
        """Measure what is missing. The run of the model as it is comes first: by it a claim speaks of the model."""
        runs: list[RunData] = list(models_of(self.known).get(self.subject.loaded.name, ()))
        main = evidence_of(runs, self.name).runs.get(MAIN)
        if main is None:
            print_line(self.console, "the model as it is")
            self.analyzed = self._keep(self._analyzed(self.subject, {}), MAIN.name)
            runs.append(self.analyzed)
        elif any(main is run for run in self.earlier):
            self.analyzed = main
        if self.subject.family.has_attention:
            self._skip(self._inapplicable())
        wanted = self._wanted(evidence_of(runs, self.name))
        for number, (kind, named) in enumerate(wanted.items(), 1):
            print_part(self.console, kind, number, len(wanted))
            for run, roles in WAYS[kind](self, named):
                names = [role.name for role in roles]
                try:
                    runs.append(self._keep(run(), names[0]))
                except InputError as error:  # it does not apply to this model
                    self._skip(dict.fromkeys(names, one_line(error)))
                except SinkscopeError as error:  # nothing of the other runs is lost
                    self.failed |= dict.fromkeys(names, one_line(error))
                if self.interrupt is not None:
                    raise self.interrupt
        found = evidence_of(runs, self.name, {self.name: {**skipped.get(self.subject.loaded.name, {}), **self.skipped}})
        return replace(found, failed=self.failed)

    def _keep(self, run: Run, role: str) -> Run:
        return run if self.kept is None else self.kept.keep(run, role)

    def _skip(self, reasons: Mapping[str, str]) -> None:
        """Roles that do not apply, with the reason."""
        self.skipped |= reasons
        if self.kept is not None and reasons:
            self.kept.skip(self.subject.loaded.name, reasons)

    @property
    def name(self) -> str:
        return self.config.model or self.subject.loaded.name

    def _wanted(self, evidence: Evidence) -> dict[str, list[Need]]:
        """Way → the roles that no run plays and that routes need, or claims which speak of this model."""
        speaking = (claim for claim in CLAIMS.values() if not any(scope(evidence) for scope in claim.scope))
        found: dict[str, list[Need]] = defaultdict(list)
        needs = dict.fromkeys(need for claim in speaking for need in claim.reads)
        nulls = [null_need(draw) for draw in range(self.config.nulls)] if MAIN in needs else []
        for role in dict.fromkeys((*needs, *nulls, *ROUTE_ROLES)):
            way = WITH.get(role.kind, role.kind)
            if way in WAYS and not (evidence.has(role) or evidence.inapplicable(role) or role.name in self.skipped):
                found[way].append(role)
        return found

    def _inapplicable(self) -> dict[str, str]:
        """Role → why its intervention cannot be done to this model, known before a text is made for it."""
        target = Target(self.subject.loaded.model, self.subject.family, seams={})
        needs = {need for claim in CLAIMS.values() for need in claim.reads} | set(ROUTE_ROLES)
        done = {need.name: parse(need.of) for need in needs if need.is_intervention} | {"streaming": parse(STREAMED)}
        return {role: why for role, part in done.items() if (why := part.inapplicable(target))}

    # --- the runs

    def input(self, given: Mapping[str, Any], observables: tuple[str, ...] = ("attention",)) -> Run:
        """The same model on something else; of the observables those that apply to it. Where the model was compared
        with itself on the text, that is not done again for other tokens in batches of the same shape.
        """
        loaded, family = self.subject.loaded, self.subject.family
        applying = [name for name in observables if OBSERVABLES[name].inapplicable(loaded.model, family) is None]
        checked = self.config.skip_parity or self.analyzed is not None
        other: dict[str, Any] = {"dataset": None, "prompt": None, "observables": applying, "skip_parity": checked}
        return self._analyzed(None, {**other, **given})

    def under_policy(self, policy: str, name: str) -> Run:
        """The model's own text, or drawn tokens, with a BOS in front of every sequence or without.

        Raises:
            InputError: there is no BOS, or the text is token ids, which are taken as they are.
        """
        of_text = {key: getattr(self.config, key) for key in ("input", "dataset", "prompt")}
        given = {**(of_text if name == NATURAL else {"input": name}), "bos": BOS_OPTIONS[policy]}
        equal = name == REPEATED and policy == WITHOUT
        run = self.input(given, OF_EQUAL_TOKENS if equal else OF_INPUTS[name])
        if run.bos != policy:
            raise InputError(f"its text is token ids, which begin with {run.manifest['input']['token_zero']}")
        return run

    def length(self, tokens: int) -> Run:
        positions = min(self.config.positions, tokens)
        given = {"seq_len": tokens, "window": tokens, "positions": positions, "observables": ("attention",)}
        return self._analyzed(None, given)

    def null(self, draw: int) -> Run:
        """Random weights, on the same text: measured as the model is, since norms of gradients depend on how many
        sequences they are summed over.
        """
        loaded, family = self.subject.loaded, self.subject.family
        applying = [name for name in OF_NULL if OBSERVABLES[name].inapplicable(loaded.model, family) is None]
        with random_weights(self.subject, self.config.seed + draw) as subject:
            run = self._analyzed(subject, {"skip_parity": True, "observables": applying})
        return Run(run.manifest | {"draw": draw}, run.tables)

    def arms(self, roles: Iterable[Need], **given: Any) -> Run:
        """Interventions, each by itself, with what the claims need of them: a loss, random controls."""
        kinds: dict[str, set[str]] = defaultdict(set)
        for role in roles:
            kinds[role.of].add(role.kind)
        subject = self.subject if given.keys() <= {"observables", "draws"} else None
        without_loss = {name for name, some in kinds.items() if not any(kind.startswith("loss") for kind in some)}
        alone = {name for name, some in kinds.items() if all(kind in ALONE for kind in some)}
        return self._experiment(subject, {"arms": {name: (name,) for name in kinds}, **given}, alone, without_loss)

    def streamed(self) -> Run:
        """Raises InputError: the model takes no text that is long enough."""
        length = min(STREAM, position_limit(self.subject.loaded.model, self.subject.family) or STREAM)
        if length < LONG:
            raise InputError(f"it takes {length} tokens at most, and a text of {LONG} is streamed")
        registers = registers_before(self.subject.loaded.model)
        keep = sorted({*KEPT, *((registers, registers + 3) if registers else ())})
        do = f"{STREAMED},keep={','.join(map(str, keep))}"
        return self._experiment(None, {"arms": {do: (do,)}, "seq_len": length, "num_seqs": STREAMS})

    def _analyzed(self, subject: Subject | None, given: Mapping[str, Any]) -> Run:
        start = time.time()
        config = self._options(AnalyzeOptions, given)
        subject = subject or self._reading(config)
        tables, facts = measure(subject, config, self.console)
        return Run.of_analysis(make_manifest(subject, config, facts, list(tables), start), tables)

    def _experiment(
        self,
        subject: Subject | None,
        given: Mapping[str, Any],
        alone: Container[str] = (),
        without_loss: Container[str] = (),
    ) -> Run:
        start = time.time()
        config = self._options(InterveneOptions, {"draws": self.config.draws, **given})
        subject = subject or self._reading(config)
        stacks = {label: parse_all(stack) for label, stack in dict(config.stacks).items()}
        experiment = Experiment(
            subject, config, stacks, config.draws, lenient=True, console=self.console, without_controls=alone,
            without_loss=without_loss, analyzed=self.analyzed if subject is self.subject else None,
        )  # fmt: skip
        tables, self.interrupt = experiment.run(), experiment.interrupt
        facts = Facts(experiment.batch_size, parity=experiment.parity_error)
        manifest = make_manifest(subject, config, facts, list(tables), start, "intervene")
        manifest |= {"arms": experiment.records, "skipped": experiment.skipped, "failed": experiment.failed}
        return Run(manifest, tables)

    def _options(self, kind: type[RunConfig], given: Mapping[str, Any]) -> Any:
        own = {name: getattr(self.config, name) for name in RunConfig.model_fields}
        return kind(**own | dict(given))

    def _reading(self, config: RunConfig) -> Subject:
        """The same model, on another input."""
        inputs = inputs_for(self.subject.loaded, config, self.subject.family)
        return Subject(self.subject.loaded, self.subject.family, inputs)


Runs = Iterator[tuple[Callable[[], Run], list[Need]]]  # each with the roles that it plays


def _one(run: Callable[[Bench], Run]) -> Callable[[Bench, list[Need]], Runs]:
    return lambda bench, roles: iter([(partial(run, bench), roles)])


def _each(run: Callable[[Bench, str], Run]) -> Callable[[Bench, list[Need]], Runs]:
    return lambda bench, roles: ((partial(run, bench, role.of), [role]) for role in roles)


def _under_policy(policy: str, bench: Bench, name: str) -> Run:
    return bench.under_policy(policy, name)


def _together(**given: Any) -> Callable[[Bench, list[Need]], Runs]:
    return lambda bench, roles: iter([(partial(bench.arms, roles, **given), roles)])


# kind of role → how its runs are measured; roles of other kinds are played by models that are trained for them
WAYS: dict[str, Callable[[Bench, list[Need]], Runs]] = {
    **{kind: _each(partial(_under_policy, policy)) for policy, kind in POLICIES.items()},
    NULL.kind: _each(lambda bench, draw: bench.null(int(draw or 0))),
    "length": _each(lambda bench, tokens: bench.length(int(tokens))),
    "domain": _each(lambda bench, name: bench.input({"input": name})),
    "do": _together(),
    "gradient-do": _together(observables=("gradient",), draws=2),
    "repeated-do": _together(input=REPEATED, dataset=None, prompt=None, bos="never"),
    "streaming": _one(Bench.streamed),
}
# kinds of roles that are measured together with others
WITH = {"loss-do": "do", "loss-do-alone": "do", "gradient-do-alone": "gradient-do"}
