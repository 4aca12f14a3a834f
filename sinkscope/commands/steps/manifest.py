"""The entries of the run.json of a training's steps."""

from sinkscope.results.schema import Manifest, ManifestPart, Name


class Step(ManifestPart):
    step: int
    folder: Name


class SeriesManifest(Manifest):
    model: str
    condition: str
    steps: list[Step]
