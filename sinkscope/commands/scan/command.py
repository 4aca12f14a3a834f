"""The command `scan`: what a checkpoint's weights can write into the residual stream, read a few rows at a time."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np
import pandas as pd

from sinkscope.commands.printout import Printout
from sinkscope.commands.scan.findings import findings, overview
from sinkscope.commands.scan.matrices import MATRIX_TABLES, are_tied, biases, built_config, every_matrix, find_ends
from sinkscope.commands.scan.networks import KEPT, SCAN_TABLES, find_networks
from sinkscope.commands.scan.options import ScanOptions
from sinkscope.errors import InputError
from sinkscope.measuring.console import Messages, print_notices, spinner
from sinkscope.models.checkpoint import open_checkpoint
from sinkscope.options.keywords import ScanKeywords
from sinkscope.options.option import checked
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options
from sinkscope.output.result import Result, figure_failure, written
from sinkscope.results.findings import Finding
from sinkscope.results.folders import own_folder
from sinkscope.results.manifest import make_manifest
from sinkscope.results.tables import LEADING, names_of, read_table

COMMAND = "scan"
ALL_TABLES = SCAN_TABLES | MATRIX_TABLES


@dataclass(frozen=True)
class Scan(Result):
    """The result of `scan`: candidates in `tables["scan"]`, and gains of norms in `tables["scan_norms"]`."""

    @property
    def findings(self) -> Sequence[Finding]:
        return findings(self.manifest, self.tables)

    @property
    def summary_tables(self) -> Mapping[str, pd.DataFrame]:
        return {"": overview(self.tables)}


def summaries(folder: Path) -> Mapping[str, pd.DataFrame]:
    """Return the table that `compare` prints of the folder of a scan."""
    return {"": overview({COMMAND: read_table(folder / "tables" / f"{COMMAND}.parquet")})}


def command(options: ScanOptions, output: OutputOptions) -> Printout:
    scanned = scan(options.model, config=options, **output.where)
    lines = "\n".join(f"- {finding.sentence}" for finding in scanned.findings)
    failure, tables = figure_failure(scanned.manifest), {COMMAND: overview(scanned.tables)}
    return Printout(scanned, markdown=lines, tables=tables, folder=output.out, failure=failure)


@with_options(ScanOptions)
def scan(
    model: str | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: ScanOptions | None = None,
    page: bool = True,
    **options: Unpack[ScanKeywords],
) -> Scan:
    """Scan the weights of a checkpoint for what can become massive, without running or building the model.

    Args:
        model: a hub id, a folder or a .gguf file; None: the demo model.
        out, overwrite, quiet, config, page: as for `analyze`.
        **options: those of the command line, which are listed below.

    Raises:
        InputError: the checkpoint cannot be read, its weights are packed, or its names are unknown.
    """
    start, console = time.time(), Messages(quiet)
    config = config or checked(ScanOptions, {"model": model, **options})
    with own_folder(out, overwrite, (COMMAND,), reads=(model,)) as folder:
        places = model, config.revision, config.gguf_file, config.allow_pickle
        files, settings, tensors = open_checkpoint(*places)
        print_notices(console, files.notices)
        family, networks, layers = find_networks(settings, tensors)
        rows, of_norms = [], {}
        for network in networks:
            with spinner(console, f"layer {network.layer} of {networks[-1].layer + 1}"):
                rows.append(network.table())
            if not np.isfinite(rows[-1]["gain"]).all():
                raise InputError(f"layer {network.layer} of {files.name} has NaN or infinite weights")
            for side, gain in (("before", network.norm.abs()), ("after", network.post.abs())):
                if gain.ne(1).any():  # there is such a norm
                    numbers = {"coordinate": int(gain.argmax()), "largest": float(gain.max())}
                    of_norms[network.layer, side] = numbers | {"median": float(gain.median())}
        table = pd.concat(rows)
        table["rank"] = table.groupby("layer")["gain"].rank(ascending=False, method="first").astype(int)
        norms = [{"layer": layer, "side": side, **row} for (layer, side), row in of_norms.items()]
        built, ends = built_config(settings), find_ends(tensors, len(networks[0].norm))
        rows_of = {"scan_norms": norms, "scan_biases": list(biases(family, built, layers))}
        if config.matrices:
            with spinner(console, "every matrix"):
                rows_of["scan_matrices"] = list(every_matrix(layers, ends))
        tables = {COMMAND: table[table["rank"] <= KEPT].sort_values(["layer", "rank"], ignore_index=True)}
        tables |= {name: pd.DataFrame(raw) for name, raw in rows_of.items() if raw}
        for name, raw in tables.items():
            raw = raw.assign(model=files.name, condition="weights")
            tables[name] = raw[[*LEADING, *names_of(ALL_TABLES[name])]]
        origin = {"name": files.name, "source": files.source, "revision": files.revision, "commit": files.commit}
        facts = {"model": origin, "family": {"name": family.name}, "tied_embeddings": are_tied(built, ends)}
        manifest = make_manifest(COMMAND, config.model_dump(mode="json"), start, tables, **facts)
        return written(Scan(manifest, tables, folder), page, figures=())
