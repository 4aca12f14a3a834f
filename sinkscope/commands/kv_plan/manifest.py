"""The entries of a run.json of `kv-plan`."""

from sinkscope.results.schema import Count, ManifestPart, RunManifest


class KvPlan(ManifestPart):
    budgets: list[float]
    calibration: Count
    documents: Count  # that the measured texts are from
    copied: Count  # last tokens of a text that repeat its first ones
    sink_layer: int  # whose output predicts sinks; -1: the first tokens are taken
    sink_coordinates: list[int]
    sink_at_least: float | None  # magnitude of an entry at one of them
    sinks: list[int]  # number of predicted sinks in each measured text


class KvPlanManifest(RunManifest):
    kv_plan: KvPlan
