"""The entries of the run.json of a training's steps."""

from sinkscope.results.schema import Manifest, Name, Part


class Step(Part):
    step: int
    folder: Name


class SeriesManifest(Manifest):
    model: str
    condition: str
    steps: list[Step]
