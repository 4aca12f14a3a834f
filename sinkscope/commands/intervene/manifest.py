"""The entries of a run.json of `intervene`."""

from typing import Annotated

from pydantic import AfterValidator

from sinkscope.results.schema import ManifestPart, Reasons, RunManifest


def _expectation(name: str | None) -> str | None:
    from sinkscope.interventions.intervention import Expectation  # imports torch, and only runs of `intervene` need it

    return name and str(Expectation(name))


class InterventionArm(ManifestPart):
    asked: list[str] = []
    do: list[str]
    paper: str
    expects: Annotated[str | None, AfterValidator(_expectation)]
    watched: list[int]
    controls: list[list[str]]


class InterveneManifest(RunManifest):
    arms: dict[str, InterventionArm]
    skipped: Reasons
    failed: Reasons = {}
