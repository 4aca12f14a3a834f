"""Muon for matrices and AdamW for the rest, and norms with a single scale: the outlier-safe factors of a training."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkscope.commands.train.architectures import architecture, fresh_model
from sinkscope.commands.train.options import TrainingConfig
from sinkscope.commands.train.trainer import MuonAndAdamW, _Trainer, matrices_of, training_arguments
from sinkscope.options.option import checked
from sinkscope.retrofits import retrofit_model

RATE = 0.01
MATRICES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def model_of(fields: str = "") -> Any:
    return fresh_model(architecture(f"bigram-backcopy-llama:vocab_size=32{fields}"), 0).requires_grad_(True)


def kinds_of(model: Any, parameters: list[nn.Parameter]) -> set[str]:
    chosen = {id(parameter) for parameter in parameters}
    return {name.split(".")[-2] for name, parameter in model.named_parameters() if id(parameter) in chosen}


def stepped(model: Any, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(32, (2, 16), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_matrices_move_orthogonally_and_the_rest_as_by_adamw() -> None:
    model, plain = model_of(), model_of()
    matrices = matrices_of(model)
    assert kinds_of(model, matrices) == MATRICES
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    optimizer = MuonAndAdamW(groups, matrices, lr=RATE)
    stepped(model, optimizer, 1)
    stepped(plain, torch.optim.AdamW(plain.parameters(), lr=RATE, weight_decay=0.0), 1)
    before = model_of()
    for name, now in model.named_parameters():
        start, adam = before.get_parameter(name), plain.get_parameter(name)
        if not any(now is own for own in matrices):
            torch.testing.assert_close(now, adam)
            continue
        # all singular values are about 1 before the scale, which gives AdamW's root mean square
        sizes = torch.linalg.svdvals((start - now).detach()) / (0.2 * max(now.shape) ** 0.5 * RATE)
        rank = sizes > 0.3  # Newton–Schulz leaves those of a gradient near 0
        assert rank.any()
        assert (sizes < 1.3).all()
        assert 0.6 < float(sizes[rank].mean()) < 1.2


def test_a_training_by_muon_gives_it_the_models_own_matrices(tmp_path: Path) -> None:
    model = retrofit_model(model_of(), None, "vga").requires_grad_(True)
    config = checked(TrainingConfig, {"optimizer": "muon"})
    trainer = _Trainer(model=model, args=training_arguments(config, tmp_path, limit=1, cpu=True))
    trainer.config = config
    optimizer: Any = trainer.create_optimizer()
    assert kinds_of(model, [p for group in optimizer.parts[1].param_groups for p in group["params"]]) == MATRICES


def test_its_state_is_restored_and_the_schedule_sets_all_rates() -> None:
    whole, part = model_of(), model_of()
    optimizer, first = (
        MuonAndAdamW([{"params": list(model.parameters())}], matrices_of(model), lr=RATE) for model in (whole, part)
    )
    stepped(whole, optimizer, 2, seed=1)
    stepped(whole, optimizer, 2, seed=2)
    stepped(part, first, 2, seed=1)
    resumed = MuonAndAdamW([{"params": list(part.parameters())}], matrices_of(part), lr=RATE)
    resumed.load_state_dict(first.state_dict())
    for group in resumed.param_groups:
        assert group["lr"] == RATE
    stepped(part, resumed, 2, seed=2)
    for ours, expected in zip(part.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    for one in (optimizer, resumed):
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.5).step()
        assert {group["lr"] for part in one.parts for group in part.param_groups} == {RATE / 2}


def test_a_single_scale_is_one_number_for_all_channels() -> None:
    model = model_of(",norm_scale=single")
    norms = [module for name, module in model.named_modules() if name.endswith("norm")]
    assert len(norms) == 3
    x = torch.randn(2, 3, 64, dtype=torch.float64)
    for norm in norms:
        nn.init.constant_(norm.weight, 1.5)
        expected = 1.5 * 64**0.5 * x / x.norm(dim=-1, keepdim=True)
        assert norm.weight.numel() == 1
        torch.testing.assert_close(norm.double()(x), expected, rtol=1e-5, atol=1e-5)
