"""The entries of a run.json of `claims`."""

from sinkscope.results.schema import Manifest, Reasons


class ClaimsManifest(Manifest):
    judged: dict[str, dict[str, str]] = {}  # model → role → the folder of its run
    failed: Reasons = {}
    skipped_roles: dict[str, Reasons] = {}  # one entry for each model
