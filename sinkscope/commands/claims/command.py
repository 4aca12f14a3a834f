"""The command `claims`: tests statements of papers on a model. It measures the missing runs, and judges all tables.

Each run is written into the folder as soon as it is measured, and the scorecard at the end. The same command resumes an
interrupted one.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import pandas as pd
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.commands.claims.collection import collect_runs, judged_folders, merge_reasons, skipped_in
from sinkscope.commands.claims.columns import CLAIM, COMMAND, ROUTE, TABLES
from sinkscope.commands.claims.evidence import LONG_TEXT, LOSS, MAIN, NATURAL, Evidence, Need, models_of, null_need
from sinkscope.commands.claims.options import ClaimsOptions
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.routes import ROUTE_ROLES, routes_of_models
from sinkscope.commands.claims.scorecard import Scorecard
from sinkscope.commands.claims.table import evidence_of, judged
from sinkscope.commands.intervene.experiment import Experiment
from sinkscope.commands.intervene.options import InterveneOptions
from sinkscope.commands.printout import Printout
from sinkscope.errors import InputError, SinkscopeError, counted, one_line
from sinkscope.interventions import Target, parse, parse_all
from sinkscope.measuring.console import lasting, print_line, print_notices
from sinkscope.measuring.measure import Facts, measure, run_manifest
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
    tokens_within_positions,
)
from sinkscope.models.in_memory import fingerprint
from sinkscope.options.keywords import ClaimsKeywords
from sinkscope.options.measuring import SEQ_LEN, RunConfig
from sinkscope.options.option import Options
from sinkscope.options.output import OutputOptions
from sinkscope.options.register import options_by_command
from sinkscope.options.signatures import with_options
from sinkscope.output.result import FIGURES_FOLDER, both, draw, figure_failure, write_data
from sinkscope.output.run import Run
from sinkscope.results.folders import FileList, alone_in, check_resumable, claim, new_folder, resumable
from sinkscope.results.manifest import MANIFEST, make_manifest, write_manifest
from sinkscope.results.run import BOS_OPTIONS, RunData
from sinkscope.results.tables import blaming_tables
from sinkscope.retrofits.retrofit import registers_before

STREAMED, FIRST_TOKENS = "streaming-window:window=64", (0, 1, 2, 4)  # numbers of first tokens that are kept
STREAM_TOKENS = 512  # tokens of a streamed text, or the most that the model can read
STREAMS = 8  # number of these texts, over which intervals are computed


def command(options: ClaimsOptions, output: OutputOptions) -> Printout:
    card = claims(options.model, config=options, **output.where)
    failed = card.manifest["failed"]
    failure = "; ".join(f"{role}: {reason}" for role, reason in failed.items())
    failure = both(failure and f"could not be measured: {failure}", figure_failure(card.manifest))
    return Printout(card, card.markdown, folder=output.out, failure=failure)


check = check_config  # checks the options of a sweep before a model is loaded


@with_options(ClaimsOptions)
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
    **options: Unpack[ClaimsKeywords],
) -> Scorecard:
    """Test the claims of papers on one model, or on the runs of several models.

    Args:
        model: as for `analyze`; with `runs` or `from_` and no model, nothing is measured.
        runs: runs that were measured before, in addition to the folders in the option `from_`.
        tokenizer, quiet: as for `analyze`.
        out: the folder to write. The same call resumes an interrupted one; a call with other options is refused.
        overwrite: start again, and replace the content of `out`.
        config: all options at once, in place of `options`.
        page: also write index.html.
        **options: those of the command line, which are listed below.

    Raises:
        InputError: an option or the input is wrong, or there is nothing to judge; nothing was written.
        SinkscopeError: the unchanged model could not be measured.
    """
    start = time.time()
    config = config or options_of(ClaimsOptions, model, options)
    folders = judged_folders(config.from_)
    known, skipped = collect_runs(runs, folders), skipped_in(folders)
    check_config(config)
    judges_only = model is None and (config.only_judges or bool(known.runs and config.model is None))
    reads, saved = (config.model, config.adapter, str(config.input), *config.from_), config.model_dump(mode="json")
    with together(config.device_map, is_in_memory(model)) as members, ExitStack() as stack:
        console = members.console(quiet)
        target: ScorecardFolder | None = None
        if (folder := members.only_first(out)) is not None:  # locked and checked before anything is computed
            path = stack.enter_context(alone_in(folder))
            check_resumable(path, COMMAND, {"config": saved}, overwrite, reads=reads, renewed=(FIGURES_FOLDER,))
            target = ScorecardFolder(path, saved, start, overwrite, page)
        if judges_only:
            if target is not None:
                target.begin()
            card = _scorecard(known.evidence(skipped), config, start)
        else:
            with open_subject(model, tokenizer, config, console) as subject:
                name = subject.loaded.name
                models = models_of(known.runs)
                if models and name not in models:
                    notice = f"the given runs are of {', '.join(models)}, not of {name}: everything is measured"
                    print_notices(console, [notice])

                def earlier() -> tuple[list[Run], dict[str, dict[str, str]]]:
                    if target is None:
                        return [], {}
                    target.begin(input_sha256=subject.inputs.sha256, weights_sha256=fingerprint(subject.loaded.model))
                    return target.runs, target.skipped

                before, inapplicable = members.of_the_first(earlier)
                known, skipped = replace(known, runs=[*known.runs, *before]), merge_reasons(skipped, inapplicable)
                measured = ClaimBench(subject, config, console, known.runs, before, target).evidence(skipped)
                card = _scorecard(known.completed(measured, name), config, start)
        return card if target is None else target.finish(card)


def _scorecard(evidence: Mapping[str, Evidence], config: ClaimsOptions, start: float) -> Scorecard:
    with blaming_tables():
        table = pd.concat([judged(one, name) for name, one in evidence.items()], ignore_index=True)

    def place(folder: Path | None) -> str:
        """Return the path of a judged run as its user would type it; "measured" for a run in memory."""
        if folder is None:
            return "measured"
        return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)

    used: dict[str, dict[str, str]] = {}  # model → role → the folders of its runs
    for name, one in evidence.items():
        folders: dict[str, tuple[Path | None, ...]] = {role.name: (run.folder,) for role, run in one.runs.items()}
        folders |= {role.name: tuple(study.folders) for role, study in one.studies.items()}
        used[name] = {role: "; ".join(map(place, paths)) for role, paths in folders.items()}
    failed = {role: reason for one in evidence.values() for role, reason in one.failed.items()}
    facts: dict[str, Any] = {"failed": failed, "skipped_roles": {name: one.skipped for name, one in evidence.items()}}
    manifest = make_manifest(COMMAND, config.model_dump(mode="json"), start, TABLES, judged=used, **facts)
    runs = {name: {role.name: run for role, run in one.runs.items()} for name, one in evidence.items()}
    return Scorecard(manifest, {CLAIM: table, ROUTE: routes_of_models(evidence)}, runs=runs)


# ------------------------------------------------------------------------------------------------------ measuring


@dataclass
class ClaimBench:
    """One model with the runs that its claims need: the known ones, and the missing ones, which it measures.

    The methods that `NeedKind.measure` names return the run of one role, or of several that are measured in one run.
    """

    subject: Subject
    config: ClaimsOptions
    console: Console
    known: Sequence[RunData]
    earlier: Sequence[RunData] = ()  # runs that the same call measured before it was interrupted
    target: "ScorecardFolder | None" = None  # where runs are written as soon as they are measured
    analyzed: RunData | None = None  # the run of the unchanged model, if this call has measured it
    interrupt: BaseException | None = None  # ended an experiment after some of its arms were finished
    skipped: dict[str, str] = field(default_factory=dict)  # role → why it does not apply
    failed: dict[str, str] = field(default_factory=dict)  # role → why its run failed

    def evidence(self, skipped: Mapping[str, Mapping[str, str]]) -> Evidence:
        """Measure the missing runs, first the unchanged model, whose run decides which claims apply."""
        name = self.config.model or self.subject.loaded.name
        runs: list[RunData] = list(models_of(self.known).get(self.subject.loaded.name, ()))
        main = evidence_of(runs, name).runs.get(MAIN)
        if main is None:
            print_line(self.console, "the model as it is")
            self.analyzed = self._write(self._analyzed({}, self.subject), MAIN.name)
            runs.append(self.analyzed)
        elif any(main is run for run in self.earlier):
            self.analyzed = main
        if self.subject.family.has_attention:
            # find the interventions that do not apply before a text is made for them
            target = Target(self.subject.loaded.model, self.subject.family, seams={})
            needs = {need for each in CLAIMS.values() for need in each.reads} | set(ROUTE_ROLES)
            interventions = {need.name: parse(need.of) for need in needs if need.record.is_intervention}
            interventions |= {"streaming": parse(STREAMED)}
            self._skip({role: why for role, part in interventions.items() if (why := part.inapplicable(target))})

        # the roles that have no run, and that routes or claims about this model need, by what they are measured with
        evidence = evidence_of(runs, name)
        applying = (claim for claim in CLAIMS.values() if not any(scope(evidence.any_run) for scope in claim.scope))
        wanted = dict.fromkeys(need for claim in applying for need in claim.reads)
        nulls = [null_need(draw) for draw in range(self.config.nulls)] if MAIN in wanted else []
        missing: dict[str, list[Need]] = defaultdict(list)
        for role in dict.fromkeys((*wanted, *nulls, *ROUTE_ROLES)):
            known = evidence.has(role) or evidence.inapplicable(role) or role.name in self.skipped
            if role.record.measure and not known:
                missing[role.record.run or role.name].append(role)
        passes = {label: self._passes(roles) for label, roles in missing.items()}
        done, seconds = (1, self.analyzed.manifest["wall_seconds"]) if self.analyzed else (0, 0.0)
        start, left = time.monotonic() - seconds, sum(passes.values())
        for number, (label, roles) in enumerate(missing.items(), 1):
            time_left = f" and {lasting((time.monotonic() - start) * left / done)}" if done else ""
            work = f"about {counted(left, 'pass', 'passes')}{time_left} left"
            print_line(self.console, f"{label} ({number} of {counted(len(missing), 'run')}; {work})")
            names = [role.name for role in roles]
            record = roles[0].record
            try:
                runs.append(self._write(getattr(self, record.measure)(roles, **record.options), names[0]))
                done += passes[label]
            except InputError as error:  # the run does not apply to this model
                self._skip(dict.fromkeys(names, one_line(error)))
            except SinkscopeError as error:  # the other runs are still measured
                self.failed |= dict.fromkeys(names, one_line(error))
            if self.interrupt is not None:
                raise self.interrupt
            left -= passes[label]
        skipped_here = {**skipped.get(self.subject.loaded.name, {}), **self.skipped}
        return replace(evidence_of(runs, name, {name: skipped_here}), failed=self.failed)

    def _passes(self, roles: Sequence[Need]) -> int:
        """Return about how often the input is read for a run: an arm with random controls once for each of them."""
        record = roles[0].record
        controlled = {role.of for role in roles if role.has_controls}
        draws = record.options.get("draws", self.config.draws)
        return record.readings * (len({role.of for role in roles}) + draws * len(controlled))

    def _write(self, run: Run, role: str) -> Run:
        return run if self.target is None else self.target.keep(run, role)

    def _skip(self, reasons: Mapping[str, str]) -> None:
        """Record roles that do not apply, with the reasons."""
        self.skipped |= reasons
        if self.target is not None and reasons:
            self.target.skip(self.subject.loaded.name, reasons)

    # --- the runs

    def domain(self, roles: Sequence[Need], observables: Iterable[str], **options: Any) -> Run:
        """Measure the same model on another input, with the observables that apply to it.

        The parity check is skipped if it was done on the text, because its batches have the same shape.
        """
        options = {"dataset": None, "prompt": None, "input": roles[0].of} | options
        options["observables"] = self._applying(observables)
        options["skip_parity"] = self.config.skip_parity or self.analyzed is not None
        if self.config.reads_all and options["input"] != self.config.input:  # its rows have lengths of their own
            options["seq_len"] = SEQ_LEN
        return self._analyzed(options)

    def under_policy(self, roles: Sequence[Need], policy: str, observables: Mapping[str, Sequence[str]]) -> Run:
        """Measure with or without a BOS before each sequence; InputError for token ids, or if there is no BOS."""
        source = roles[0].of
        of_text = {key: getattr(self.config, key) for key in ("input", "dataset", "prompt")}
        options = of_text if source == NATURAL else {}
        run = self.domain(roles, observables[source], bos=BOS_OPTIONS[policy], **options)
        if run.bos != policy:
            raise InputError(f"its text is token ids, which begin with {run.manifest['input']['token_zero']}")
        return run

    def length(self, roles: Sequence[Need], observables: Sequence[str]) -> Run:
        tokens = int(roles[0].of)
        positions = min(self.config.positions, tokens)
        return self._analyzed({"seq_len": tokens, "window": tokens, "positions": positions, "observables": observables})

    def states(self, roles: Sequence[Need], observables: Iterable[str]) -> Run:
        return self._analyzed({"observables": self._applying(observables)}, self.subject)

    def null(self, roles: Sequence[Need], observables: Iterable[str]) -> Run:
        """Measure random weights on as many sequences as the model, since norms of gradients depend on their number."""
        draw = int(roles[0].of or 0)
        with random_weights(self.subject, self.config.seed + draw) as subject:
            run = self._analyzed({"skip_parity": True, "observables": self._applying(observables)}, subject)
        return Run(run.manifest | {"draw": draw}, run.tables)

    def streamed(self, roles: Sequence[Need]) -> Run:
        """Measure long texts with a streaming window; InputError if the model cannot read them."""
        length = tokens_within_positions(STREAM_TOKENS, self.subject.loaded.model, self.subject.family)
        if length < LONG_TEXT:
            raise InputError(f"it takes at most {length} tokens, and the streamed text has {LONG_TEXT}")
        registers = registers_before(self.subject.loaded.model)
        keep = sorted({*FIRST_TOKENS, *((registers, registers + 3) if registers else ())})
        do = f"{STREAMED},keep={','.join(map(str, keep))}"
        return self._experiment({do: ()}, seq_len=length, num_seqs=STREAMS)

    def arms(self, roles: Sequence[Need], **options: Any) -> Run:
        """Measure interventions one by one, with a loss and random controls if claims need them."""
        arms: dict[str, list[Need]] = defaultdict(list)
        for role in roles:
            arms[role.of].append(role)
        return self._experiment(arms, **options)

    def _experiment(self, arms: Mapping[str, Sequence[Need]], **options: Any) -> Run:
        """Measure arms, each with the needs that read it, of which any may need controls or a loss; () needs both."""
        start = time.time()
        asked = {"draws": self.config.draws, "arms": {name: (name,) for name in arms}, **options}
        config = self._options(InterveneOptions, asked)
        subject = self.subject if options.keys() <= {"observables", "draws"} else self._reading(config)
        needs = {name: roles for name, roles in arms.items() if roles}
        experiment = Experiment(
            subject,
            config,
            {label: parse_all(stack) for label, stack in dict(config.stacks).items()},
            config.draws,
            lenient=True,
            console=self.console,
            without_controls={name for name, roles in needs.items() if not any(role.has_controls for role in roles)},
            without_loss={name for name, roles in needs.items() if all(role.record.table != LOSS for role in roles)},
            analyzed=self.analyzed if subject is self.subject else None,
        )
        tables, self.interrupt = experiment.run(), experiment.interrupt
        facts = Facts(experiment.batch_size, parity=experiment.parity_error)
        manifest = run_manifest(subject, config, facts, list(tables), start, "intervene")
        manifest |= {"arms": experiment.records, "skipped": experiment.skipped, "failed": experiment.failed}
        return Run(manifest, tables)

    def _applying(self, observables: Iterable[str]) -> list[str]:
        model, family = self.subject.loaded.model, self.subject.family
        kinds = {name: OBSERVABLES[name] for name in observables}
        if self.subject.without_loss is not None:
            kinds = {name: kind for name, kind in kinds.items() if not kind.backward}
        return [name for name, kind in kinds.items() if kind.inapplicable(model, family) is None]

    def _analyzed(self, options: Mapping[str, Any], subject: Subject | None = None) -> Run:
        """Measure the model on the input that the options name, or another subject."""
        start = time.time()
        config = self._options(options_by_command().get("analyze", RunConfig), options)
        subject = subject or self._reading(config)
        tables, facts = measure(subject, config, self.console)
        return Run.of_analysis(run_manifest(subject, config, facts, list(tables), start), tables)

    def _options(self, kind: type[Options], options: Mapping[str, Any]) -> Any:
        return kind(**{name: getattr(self.config, name) for name in RunConfig.model_fields} | dict(options))

    def _reading(self, config: RunConfig) -> Subject:
        """Return the same model with the input that the options name."""
        return replace(self.subject, inputs=inputs_for(self.subject.loaded, config, self.subject.family))


# ----------------------------------------------------------------------------------------------------- the folder


@dataclass
class ScorecardFolder:
    """The folder of a scorecard, which is written step by step."""

    folder: Path
    config: Mapping[str, Any]  # only the same options can resume it
    start: float
    overwrite: bool
    page: bool
    runs: list[Run] = field(default_factory=list)  # runs that an earlier session measured
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)  # model → role → why it does not apply

    def begin(self, **facts: str) -> None:
        """Claim the folder, and find the runs of an earlier session; InputError if their `facts` differ."""
        self._facts = facts
        self._files = FileList(self.folder, [], lambda: write_manifest(self.folder, self._manifest()))
        options = {"config": dict(self.config), **facts}
        before = None if self.overwrite else resumable(self.folder, COMMAND, options)
        if before is not None:
            self._files.names, self.skipped = before["files"], before["skipped_roles"]
        with new_folder(self.folder) if before is None else nullcontext(self.folder) as folder:
            claim(folder, self._manifest())
        self.runs = [Run.open(path.parent) for path in sorted(self.folder.glob(f"runs/*/{MANIFEST}"))]

    def keep(self, run: RunData, role: str) -> Run:
        """Write the run of a role."""
        target = self.folder / "runs" / role.replace(":", "-")
        with self._files.new_folder(target) as fresh:
            write_data(Run(run.manifest, run.tables), fresh, is_drawn=False)
        return Run(run.manifest, run.tables, target)

    def skip(self, model: str, reasons: Mapping[str, str]) -> None:
        """Record the roles of a model that do not apply."""
        self.skipped.setdefault(model, {}).update(reasons)
        write_manifest(self.folder, self._manifest())

    def finish(self, card: Scorecard) -> Scorecard:
        """Write the scorecard, and the runs that were passed as objects. run.json comes last."""
        for name, run in card.measured.items():
            self.keep(run, name)
        card = replace(card, manifest={**card.manifest, **self._facts}, folder=self.folder)
        self._files.add(*(f"tables/{name}.parquet" for name in card.tables), *card.texts)
        card.write_files(self.folder)
        write_manifest(self.folder, {**card.manifest, "drawn": False, "files": self._files.names})
        return draw(card, page=self.page, files=self._files)

    def _manifest(self) -> dict[str, Any]:
        facts: dict[str, Any] = {**self._facts, "skipped_roles": self.skipped, "files": self._files.names}
        return make_manifest(COMMAND, self.config, self.start, (), **facts)
