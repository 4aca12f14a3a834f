"""The command `card`: the metrics of runs for model cards, and a dataset of them, to share on the hub."""

import os
import time
from pathlib import Path

import pandas as pd
from huggingface_hub import HfApi, constants, errors
from huggingface_hub.utils import validate_repo_id

from sinkscope.commands.card.options import CardOptions
from sinkscope.commands.card.output import Card, Given, opened
from sinkscope.commands.card.tables import card_tables
from sinkscope.commands.claims.columns import CLAIM
from sinkscope.commands.printout import Printout
from sinkscope.errors import InputError, SinkscopeError, described, explained
from sinkscope.options.output import OutputOptions
from sinkscope.output.result import figure_failure, written
from sinkscope.output.run import Run
from sinkscope.results.folders import own_folder
from sinkscope.results.manifest import MANIFEST, PAGE, make_manifest
from sinkscope.results.tables import blaming_tables

COMMAND = "card"


def command(options: CardOptions, output: OutputOptions) -> Printout:
    where = {name: value for name, value in output.where.items() if name != "quiet"}
    made = card(*options.runs, push=options.push, **where)
    pushed = [f"uploaded to {constants.ENDPOINT}/datasets/{options.push}"] if options.push else []
    text = "" if made.folder else "\n\n".join(made.model_cards.values())
    return Printout(made, text=text, notes=pushed, folder=made.folder, failure=figure_failure(made.manifest))


def card(
    *runs: Given,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    push: str | None = None,
    page: bool = True,
) -> Card:
    """Make the model cards of runs, and a dataset of all of them; with `out`, also write them there.

    `card.model_cards[MODEL]` is a block of YAML for the card of a model, and its findings in Markdown; `card.tables`
    has the dataset.

    Args:
        *runs: Runs of `analyze`, `intervene` or `quantize`, results of `claims`, or the folders of these commands; also
            the folders of sweeps with such cells.
        out: The folder to write: the cards, and the dataset with its own card.
        overwrite: Replace an earlier card in `out`.
        push: Upload `out` as this dataset on the hub, which is created if it does not exist.
        page: With `out`, also write index.html.

    Raises:
        InputError: No run was given, a folder holds none of these, `out` is taken, or `push` is not a name.
        SinkscopeError: Writing or uploading failed.
    """
    start = time.time()
    if push is not None:
        with explained(f"--push {push}: name a dataset as ORG/NAME", errors.HFValidationError):
            validate_repo_id(push)
        if out is None:
            raise InputError("--push uploads a folder: name it with --out")
    entries = [entry for run in runs for entry in opened(run)]
    if not entries:
        raise InputError("a card needs at least one run, or a folder with a cell that is done")
    folders = [entry.folder for entry, _ in entries]
    with blaming_tables(), own_folder(out, overwrite, (COMMAND,), reads=folders) as folder:
        measured = [(entry, family) for entry, family in entries if isinstance(entry, Run)]
        judged = tuple(entry for entry, _ in entries if not isinstance(entry, Run))
        tables = card_tables(measured)
        if judged:
            tables[CLAIM] = pd.concat([one.table for one in judged], ignore_index=True)
        manifest = make_manifest(COMMAND, {"runs": list(map(str, folders))}, start, tables)
        made = written(Card(manifest, tables, folder, tuple(run for run, _ in measured), judged), page)
    if push is not None:
        assert made.folder is not None
        upload(made.folder, push)
    return made


def upload(folder: Path, repo: str) -> None:
    """Upload the folder of a card as a dataset to the hub, which is created if it does not exist."""
    hub = HfApi(endpoint=constants.ENDPOINT)
    try:
        hub.create_repo(repo, repo_type="dataset", exist_ok=True)
        hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            repo_type="dataset",
            ignore_patterns=[MANIFEST, PAGE],  # paths of this machine; the hub has a viewer of its own
            commit_message="Measured by sinkscope",
        )
    except Exception as error:  # the hub, its network, or a refused card
        refused = isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403)
        advice = ": log in with `hf auth login` or set HF_TOKEN to a token that may write there" if refused else ""
        failure = f"uploading to {repo} failed [{described(error)}]{advice}; {folder} is complete"
        raise SinkscopeError(failure) from error
