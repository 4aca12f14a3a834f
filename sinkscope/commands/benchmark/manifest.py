"""The entries of a run.json of `benchmark`."""

from sinkscope.results.schema import Count, Manifest, ManifestPart


class BenchmarkModel(ManifestPart):
    name: str
    parameters: Count


class BenchmarkManifest(Manifest):
    model: BenchmarkModel
