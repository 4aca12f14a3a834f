"""Compare estimates of memory and time with what runs took: `python tests/benchmarks/estimates.py [OPTION …]`.

For the demo model, Gemma3-270M (`make models`) and a made Llama of 457M parameters, in float32 and bfloat16, each in a
process of its own. Measured are the peak of resident memory and the wall time until the tables are complete; run.json
has both, beside the estimates. Further options are those of `analyze`, such as --num-seqs 16.
"""

import json
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 16}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=8, vocab_size=151_000, tie_word_embeddings=True)


def make(folder: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LLAMA).to(torch.bfloat16).save_pretrained(folder)


def main(options: list[str]) -> None:
    print(f"{'':24}{'MB, estimated':>14}{'measured':>10}{'ratio':>7}{'s, estimated':>14}{'measured':>10}{'ratio':>7}")
    with tempfile.TemporaryDirectory() as folder:
        llama, out = Path(folder, "llama"), Path(folder, "run")
        making = get_context("spawn").Process(target=make, args=(llama,))  # a child's peak begins with its parent's
        making.start()
        making.join()
        models = {"demo": [], "gemma3-270m": [".models/gemma3-270m.gguf"], "llama": [llama, "--input", "random"]}
        for name, model in models.items():
            for dtype in ("float32", "bfloat16"):
                arguments = [*model, "--dtype", dtype, "--out", out, "--overwrite", "--no-page", "--quiet", *options]
                subprocess.run([sys.executable, "-m", "sinkscope.cli", "analyze", *map(str, arguments)], check=True)
                run = json.loads((out / "run.json").read_text())
                line = f"{name + ', ' + dtype:24}"
                for estimated, measured in (("memory_mb", "peak_memory_mb"), ("seconds", "wall_seconds")):
                    pair = run["expected"][estimated], run[measured]
                    line += f"{pair[0]:14.0f}{pair[1]:10.0f}{pair[0] / pair[1]:7.2f}"
                print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
