"""From `analyze` to the tables of a paper: sink rates with intervals at three ε, and two models head by head.

python paper_table.py MODEL SECOND [TEXT]    # writes table.tex; TEXT: of the second run, if not that of the first
"""

import sys
from pathlib import Path

import sinkscope

model, second, *text = sys.argv[1:]
options = {"observables": "attention", "num_seqs": 32, "seq_len": 64}
runs = [
    sinkscope.analyze(model, out="runs/first", overwrite=True, **options),
    sinkscope.analyze(second, out="runs/second", overwrite=True, input=text[0] if text else "natural", **options),
]
tables = [run.estimate("sink_rate", by="layer", epsilon=[0.2, 0.3, 0.4]).to_latex() for run in runs]
whole = sinkscope.compare(*runs, metrics="sink_rate,window_mass")
tables.append(whole.formatted("latex"))
if runs[0].manifest["family"] == runs[1].manifest["family"]:  # the same layers and heads
    heads = sinkscope.compare(*runs, by="head")
    tables.append(heads.formatted("latex"))
    print(*(finding.sentence for finding in heads.findings), sep="\n")
print(whole.table.to_string())
Path("table.tex").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
