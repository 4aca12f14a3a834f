"""The same plugin's command: `sinkscope dominance MODEL`. Torch is imported when the command runs."""

from typing import Any, ClassVar

from sinkscope.options.measuring import ObservableOptions, RunConfig
from sinkscope.options.option import option
from sinkscope.options.output import OutputOptions
from sinkscope.options.register import Command


class DominanceOptions(RunConfig):
    """Measure how far one entry dominates the residual norm, and name the layers where it does."""

    panel: ClassVar = "Measuring"

    writes: ClassVar = "nothing"
    refused: ClassVar = {"observables": "`dominance` measures one"}
    hidden: ClassVar = tuple(ObservableOptions.model_fields)

    at_least: float = option(0.5, "Share of the squared norm.", metavar="S", ge=0.0, le=1.0)


def command(options: DominanceOptions, output: OutputOptions) -> Any:
    from sinkscope.commands.measured import shown

    return shown(dominance(options.model, config=options, **output.where), output)


def dominance(
    model: Any = None,
    *,
    config: DominanceOptions | None = None,
    out: Any = None,
    overwrite: bool = False,
    quiet: bool = True,
    page: bool = True,
    **options: Any,
) -> Any:
    """Measure the observable `dominance` and return a Run."""
    import time

    from sinkscope.commands.measured import opened
    from sinkscope.measuring.measure import measure, run_manifest
    from sinkscope.measuring.subject import options_of
    from sinkscope.output.run import Run, finished

    start = time.time()
    config = config or options_of(DominanceOptions, model, options)
    measured = config.model_copy(update={"observables": ("dominance",)})
    with opened(model, None, measured, out, overwrite, quiet) as (subject, folder, console):
        tables, facts = measure(subject, measured, console)
        manifest = run_manifest(subject, config, facts, list(tables), start, "dominance")
        return finished(Run(manifest, tables, folder), console, page=page)


def report(run: Any) -> Any:
    """Return the report: the layers in which one entry has at least this share of the norm at position 0."""
    from sinkscope.results.findings import Finding, Outcome
    from sinkscope.verdict.report import Report, layers_text

    least, table = run.manifest["config"]["at_least"], run.tables["dominance"]
    shares = table[table["position"] == 0].set_index("layer")["share"]
    layers = shares.index[shares >= least]
    outcome = Outcome.PRESENT if len(layers) else Outcome.ABSENT
    where = layers_text(layers) if len(layers) else "no layer"
    sentence = f"One entry has at least {least:.0%} of the norm at position 0 in {where}."
    finding = Finding("dominance", "Dominance", outcome, float(shares.max()), is_headline=True, sentence=sentence)
    overview = shares.map("{:.1%}".format).rename_axis("layer").reset_index().astype(str)
    return Report(f"{run.model}: dominance", (), overview, (finding,))


DOMINANCE = Command(
    "dominance",
    __name__,
    DominanceOptions,
    module=__name__,
    public={"dominance": f"{__name__}:dominance"},
    manifest="sinkscope.results.schema:RunManifest",
    report=f"{__name__}:report",
)
