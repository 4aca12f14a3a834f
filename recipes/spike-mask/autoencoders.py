"""Small TopK autoencoders of SmolLM2's states, trained with the spike mask, without it and with a random mask.

    python recipes/spike-mask/autoencoders.py reports/spike-mask

Trains three seeds at three layers inside the life of the sink, ten minutes on one core, and writes autoencoders.csv and
README.md. Every arm is tested on the same held-out tokens that are not sinks. The random mask leaves out as many tokens
as the spike mask, but no sinks: it shows what fewer tokens alone do.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

import sinkscope
from sinkscope.results.statistics import mean_of_rates, mean_of_runs

LAYERS = (14, 20, 26)
SEEDS = (0, 1, 2)
SEQUENCES, HELD_OUT = 240, 60  # the last are held out
FEATURES, ACTIVE = 768, 16
STEPS, BATCH, RATE = 300, 192, 1e-3
ARMS = ("mask", "none", "random")


class TopK(nn.Module):
    """An autoencoder with FEATURES features, of which ACTIVE are kept at each token (Gao et al. 2024)."""

    def __init__(self, states: torch.Tensor) -> None:
        """Take the center and the scale of the training states (N,D): their mean, and the root of the mean square."""
        super().__init__()
        self.center = states.mean(0)
        self.scale = (states - self.center).square().mean().sqrt()
        decoder = F.normalize(torch.randn(FEATURES, states.shape[1]), dim=1)
        self.decoder = nn.Parameter(decoder)
        self.encoder = nn.Linear(states.shape[1], FEATURES)
        with torch.no_grad():
            self.encoder.weight.copy_(decoder)
            self.encoder.bias.zero_()

    def features(self, states: torch.Tensor) -> torch.Tensor:
        top = F.relu(self.encoder((states - self.center) / self.scale)).topk(ACTIVE)
        return torch.zeros(len(states), FEATURES).scatter(1, top.indices, top.values)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.center + self.scale * (self.features(states) @ self.decoder)


def trained(states: torch.Tensor, seed: int) -> TopK:
    torch.manual_seed(seed)
    model = TopK(states)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        batch = states[torch.randint(len(states), (BATCH,))]
        loss = ((model(batch) - batch) / model.scale).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def tested(model: TopK, states: torch.Tensor) -> tuple[float, float]:
    """Return the explained variance of states (N,D), and the share of features that are active at none of them."""
    variance = 1 - (model(states) - states).square().sum() / (states - states.mean(0)).square().sum()
    return float(variance), float((model.features(states) > 0).any(0).logical_not().float().mean())


@torch.no_grad()
def states_of(ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return layer → its outputs (N,T,D), from plain transformers."""
    model = sinkscope.load().model
    parts = [model(some, output_hidden_states=True).hidden_states for some in ids.split(8)]
    return {layer: torch.cat([part[layer + 1] for part in parts]) for layer in LAYERS}


def main(folder: Path) -> None:
    mask = sinkscope.spike_mask(num_seqs=SEQUENCES)
    rows = []
    for layer, states in states_of(mask.token_ids).items():
        is_sink = mask.tokens[layer]
        train, held_out = states[:-HELD_OUT], states[-HELD_OUT:][~is_sink[-HELD_OUT:]]
        sinks = is_sink[:-HELD_OUT]
        for seed in SEEDS:
            others = np.flatnonzero(~sinks.flatten().numpy())
            drawn = torch.zeros(sinks.numel(), dtype=torch.bool)
            drawn[np.random.default_rng(seed).choice(others, int(sinks.sum()), replace=False)] = True
            left_out = {"mask": sinks, "none": torch.zeros_like(sinks), "random": drawn.view_as(sinks)}
            for arm in ARMS:
                explained, dead = tested(trained(train[~left_out[arm]], seed), held_out)
                rows.append((layer, arm, seed, int(left_out[arm].sum()), sinks.numel(), explained, dead))
                print(*rows[-1])
    columns = ["layer", "arm", "seed", "left_out", "tokens", "explained_variance", "dead_features"]
    table = pd.DataFrame(rows, columns=columns)
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "autoencoders.csv", index=False, float_format="%.5g")
    (folder / "README.md").write_text(report(table), encoding="utf-8")


def report(table: pd.DataFrame) -> str:
    lines = [
        "# Autoencoders with the spike mask",
        "",
        f"TopK autoencoders ({FEATURES} features, {ACTIVE} active) of SmolLM2-135M-Instruct's states, tested on "
        f"held-out tokens that are not sinks: mean over {len(SEEDS)} seeds and its 95 % interval. "
        "`python recipes/spike-mask/autoencoders.py reports/spike-mask` repeats it.",
        "",
        f"Of {table['tokens'].iloc[0]:,} training tokens the mask leaves out {table['left_out'].max()}. "
        f"{SEQUENCES - HELD_OUT} of these are first tokens: in this model, leaving out position 0 alone would do "
        "nearly the same. Center, scale and loss of the other arms are those of all their tokens, so sinks take part "
        "in each. The random mask leaves out as many tokens that are no sinks: fewer tokens alone change nothing.",
        "",
        "| layer | arm | tokens left out | explained variance | dead features |",
        "| ---: | --- | ---: | ---: | ---: |",
    ]
    for (layer, arm), own in table.groupby(["layer", "arm"], sort=False):
        cells = []
        for column, mean in (("explained_variance", mean_of_runs), ("dead_features", mean_of_rates)):
            found = mean(own[column].to_numpy())
            cells.append(f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]")
        share = own["left_out"].iloc[0] / own["tokens"].iloc[0]
        lines.append(f"| {layer} | {arm} | {share:.2%} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
