"""Several processes train the model that one process trains: the same blocks a step, the same losses and weights."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from test_training import config, model, repetitive
from tiny import VOCAB

from sinkscope.blocks import Blocks
from sinkscope.training import shuffled, train

ROOT = Path(__file__).parent.parent
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
# of float32 sums in another order
ROUND_OFF: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-6}


def launched(script: str, folder: Path, *args: object, **environment: str) -> None:
    """The script on two processes of the CPU, which talk through gloo."""
    folder.mkdir(exist_ok=True)
    (folder / "launched.py").write_text(script)
    told = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | environment
    command = [*LAUNCH, str(folder / "launched.py"), str(folder), *map(str, args)]
    done = subprocess.run(command, env=told, timeout=180, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


def random_blocks(count: int) -> Blocks:
    """Every block another one, so that it matters which of them a step reads."""
    rows = np.random.default_rng(1).integers(3, VOCAB, (count + 2, 16)).astype(np.int64)
    return Blocks(rows[:count], rows[count:], "random")


# 11 blocks are no whole number of batches: the third step of batches of 4 goes on into the next epoch
CASES = {
    "a batch a step": {"batch_size": 2, "accumulation": 1},
    "three batches a step": {"batch_size": 1, "accumulation": 3},
}

TWO = """
import json, sys
from pathlib import Path
import torch
from test_distributed import CASES, random_blocks
from test_training import config, model
from sinkscope.training import launched, train

for name, options in CASES.items():
    changed = model()
    history = train(changed, random_blocks(11), config(steps=8, log_every=1, **options), Path(sys.argv[1]) / name)
    if launched().is_main_process:
        history.to_parquet(Path(sys.argv[1]) / f"{name}.parquet")
        torch.save(changed.state_dict(), Path(sys.argv[1]) / f"{name}.pt")
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    launched(TWO, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one_with_the_same_global_batch(case: str, two: Path, tmp_path: Path) -> None:
    """Losses, gradient norms, learning rates and gates at every step, and the weights at the end."""
    options = CASES[case] | {"batch_size": 2 * CASES[case]["batch_size"]}
    alone = model()
    expected = train(alone, random_blocks(11), config(steps=8, log_every=1, **options), tmp_path)
    history = pd.read_parquet(two / f"{case}.parquet")
    names = ["layer", "step", "metric"]
    assert set(expected["metric"]) >= {"loss", "gradient_norm", "learning_rate", "gate_displacement_max"}
    assert history[names].equals(expected[names])
    np.testing.assert_allclose(history["value"], expected["value"], **ROUND_OFF)
    torch.testing.assert_close(torch.load(two / f"{case}.pt"), dict(alone.state_dict()), **ROUND_OFF)


def test_every_block_is_read_once_before_any_is_read_again() -> None:
    order = shuffled(5, 13, seed=3)
    assert [sorted(order[at : at + 5]) for at in (0, 5)] == [[0, 1, 2, 3, 4]] * 2
    assert len(order) == 13
    assert len(set(order[10:])) == 3
    assert order[:5].tolist() != order[5:10].tolist()
    assert order.tolist() == shuffled(5, 13, seed=3).tolist() != shuffled(5, 13, seed=4).tolist()
    assert shuffled(5, 3, seed=3).tolist() == order[:3].tolist()
