"""Runs the recipes of `quantize` in llm-compressor, and compares its loss with the predicted one, scheme by scheme.

    make consumers

llm-compressor has an environment of its own (.venv/consumers). It calibrates each layer with the earlier layers
quantized; sinkscope measures static ranges in the model in full precision. So the schemes with static ranges
(FP8, NVFP4) may differ by TOLERANCE, the others by round-off that moves entries to a neighboring number.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import sinkscope
from sinkscope.commands.quantize.options import QuantizeOptions
from sinkscope.measuring.console import Messages
from sinkscope.measuring.subject import open_subject

PYTHON = Path(".venv/consumers/bin/python")
TOLERANCE = 0.02  # nats per token

CONSUMER = """
import json, sys
import numpy as np
import torch
from datasets import Dataset
from llmcompressor import oneshot
from transformers import AutoModelForCausalLM

folder, recipe = sys.argv[1:]
ids = torch.tensor(np.load(f"{folder}/ids.npy"))
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)

def loss():
    with torch.no_grad():
        logits = model(ids[:16]).logits[:, :-1].double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:16, 1:].flatten()).item()

before = loss()
mask = torch.ones_like(ids[16:]).tolist()
texts = Dataset.from_dict({"input_ids": ids[16:].tolist(), "attention_mask": mask})
oneshot(model=model, recipe=recipe, dataset=texts, num_calibration_samples=16, max_seq_length=64)
print(json.dumps(loss() - before))
"""


def main(folder: Path) -> None:
    """Write the model and its texts, simulate all presets, run each recipe, and print both costs."""
    folder.mkdir(parents=True, exist_ok=True)
    config = QuantizeOptions(num_seqs=32, seq_len=64)
    with open_subject(None, None, config, Messages(quiet=True)) as subject:
        ids = np.stack(subject.inputs.sequences)
        subject.loaded.model.save_pretrained(folder / "model")
    np.save(folder / "ids.npy", ids)
    where: dict[str, Any] = {"out": folder / "run", "overwrite": True, "page": False, "figures": ()}
    run = sinkscope.quantize(folder / "model", input=list(ids), num_seqs=16, seq_len=64, calibration=16, **where)
    costs = run.tables["formats"].query("part == 'all'").set_index("scheme")["cost"]
    wrong = []
    for recipe in sorted((folder / "run").glob("llm-compressor-*.yaml")):
        scheme = recipe.stem.removeprefix("llm-compressor-")
        done = subprocess.run(
            [PYTHON, "-c", CONSUMER, folder, recipe], capture_output=True, text=True, check=False,
        )  # fmt: skip
        actual = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else float("nan")
        print(f"{scheme:12} predicted {costs[scheme]:.4f}, llm-compressor {actual:.4f} nats per token", flush=True)
        if not abs(costs[scheme] - actual) <= TOLERANCE:
            wrong.append(scheme)
            print(done.stderr[-2000:], file=sys.stderr)
    if wrong:
        raise SystemExit(f"not as predicted: {', '.join(wrong)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
