"""Every sentence about stored runs is the one that was read and checked, and that of a report is from its tables.

    python tests/verdict/test_stored.py  # writes them again, after a change of sentences that is meant: read the diff

    sinkscope analyze --from tests/verdict/stored/analyze --allow-pickle --out runs/stored

measures a stored run again, after a new column: the table that has it replaces the stored one. `make report` makes
those of `reports/` again.

The stored runs are of MGM (`analyze` and `intervene` on six and four sequences of 32 tokens); the tables have numbers
that differ, so that a sentence with another number, or of another outcome, is not the stored one.
"""

from pathlib import Path

import pytest

from sinkscope.output.run import Run
from sinkscope.results.manifest import read_manifest
from sinkscope.verdict.report import report_markdown

STORED = Path(__file__).parent / "stored"
REPORTS = Path(__file__).parents[2] / "reports"
COMMANDS = ("doctor", "kv-plan", "quantize")  # their sentences need no tables by sequence, which reports do not have
FOLDERS = [path.parent for path in sorted(STORED.glob("*/run.json"))]
FOLDERS += [
    path.parent for path in sorted(REPORTS.rglob("run.json")) if read_manifest(path.parent, None)["command"] in COMMANDS
]


def sentences(folder: Path) -> str:
    return report_markdown(Run.open(folder).report) + "\n"


def stored_verdict(folder: Path) -> tuple[str, str, str]:
    """Return the stored sentences, the heading after them, and the list of files of a report."""
    path = folder / "verdict.md"
    return path.read_text(encoding="utf-8").partition("\n### Files") if path.exists() else ("", "", "")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_sentences_are_those_that_were_read(folder: Path) -> None:
    assert sentences(folder).splitlines() == stored_verdict(folder)[0].rstrip().splitlines()


if __name__ == "__main__":
    for each in FOLDERS:
        (each / "verdict.md").write_text(sentences(each) + "".join(stored_verdict(each)[1:]), encoding="utf-8")
