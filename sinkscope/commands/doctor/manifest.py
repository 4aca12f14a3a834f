"""The entries of a run.json of `doctor`."""

from sinkscope.results.schema import ManifestPart, Reasons, RunManifest


class Overflow(ManifestPart):
    dtype: str
    limit: float  # its largest finite number
    refused: Reasons = {}  # remedy → why it was left out


class DoctorManifest(RunManifest):
    overflow: Overflow
