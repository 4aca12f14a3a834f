"""The entries of a run.json of `benchmark`."""

from sinkscope.results.schema import Count, Manifest, Part


class BenchmarkModel(Part):
    name: str
    parameters: Count


class BenchmarkManifest(Manifest):
    model: BenchmarkModel
