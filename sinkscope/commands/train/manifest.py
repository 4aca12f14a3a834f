"""The entries of a run.json of `retrofit` and `train`."""

from typing import Any

from sinkscope.results.schema import Manifest, ManifestPart, Name


class TrainingArm(ManifestPart):
    method: str
    parameters: dict[str, Any]
    label: str
    seed: int


class ArmsManifest(Manifest):
    arms: dict[Name, TrainingArm]
