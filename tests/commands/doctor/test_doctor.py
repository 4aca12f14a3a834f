"""`doctor`: the facts, checks and notes of its report, overflow, and logits from elsewhere."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.every_model import tiny_of
from support.retrofit_command import command_line
from tiny import tiny_model, tiny_tokens

from sinkscope.commands.doctor import command as doctors
from sinkscope.commands.doctor.command import doctor
from sinkscope.commands.doctor.options import DoctorOptions
from sinkscope.errors import InputError
from sinkscope.interventions import INTERVENTIONS
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.parity import AttentionComparison
from sinkscope.measuring.subject import load_model, options_of
from sinkscope.models.families import find_family
from sinkscope.output.run import Run
from sinkscope.results.findings import Outcome


def test_the_doctor_lists_what_applies_and_notes_only_what_is_expected() -> None:
    report = doctor(tiny_model("llama"))
    unexpected = [name for kinds in (OBSERVABLES, INTERVENTIONS) for name, kind in kinds.items() if not kind.expected]
    assert "gate" in unexpected
    assert not [note for note in report.notes if note.split(" does not apply")[0] in unexpected]
    assert "query-bias does not apply: its queries have no bias" in report.notes
    observables, interventions = (report.facts[kind].split(", ") for kind in ("observables", "interventions"))
    assert ("attention" in observables, "gate" in observables) == (True, False)
    assert ("mask-sink" in interventions, "nullify-query-bias" in interventions) == (True, False)


def test_a_model_with_few_positions_is_examined() -> None:
    assert doctor(tiny_model("gpt2", n_positions=32)).ok


@pytest.mark.parametrize(
    "option", [{"num_seqs": 3}, {"seq_len": 7}, {"seed": 4}, {"bos": "always"}, {"input": "random"}]
)
def test_options_of_a_text_need_a_dtype(option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(option))}=… needs dtype=…, because nothing else reads a text"):
        doctor(tiny_model("llama"), **option)


def test_layers_with_rare_positions_are_named() -> None:
    report = doctor(tiny_of("smollm3"))
    assert report.facts["wiring"] == "sequential, positions rotary and none (none in layer 3)"


def test_a_failed_check_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    assert command_line("doctor", tmp_path).exit_code == 0
    monkeypatch.setattr("sinkscope.commands.doctor.command.Report.ok", False)
    done = command_line("doctor", tmp_path)
    assert (done.exit_code, done.stderr.startswith("sinkscope: a check failed")) == (1, True)


def test_layers_that_slide_a_window_are_counted() -> None:
    attention = doctor(tiny_model("gemma3")).facts["attention"]
    assert attention.endswith("; 2 layers slide a window of 6")


def test_both_kernels_and_all_layers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    errors, kernels, opening = [0.0, 1.0, 0.0], list[str](), doctors.open_tracer
    monkeypatch.setattr(doctors, "check_wiring", lambda *_: errors.pop())
    monkeypatch.setattr(doctors, "open_tracer", lambda *args: kernels.append(args[-1]) or opening(*args))
    checks = [passed for what, passed, _ in doctor(tiny_model("llama")).checks if what == "residual stream"]
    assert (checks, kernels) == ([False], ["sdpa", "eager"])


def test_the_attention_that_exceeds_round_off_most_decides() -> None:
    of_layers = [AttentionComparison(layer, 0.1, excess) for layer, excess in enumerate((0.5, 1.5, 0.1))]
    assert [doctors._attention_check("", some)[1] for some in (of_layers, of_layers[::2])] == [False, True]


@pytest.mark.parametrize(("dtype", "loaded"), [(None, None), ("float16", "float32"), ("float32", "float32")])
def test_a_model_is_loaded_in_full_precision_to_predict(dtype: str | None, loaded: str | None) -> None:
    stopped = patch.object(doctors, "load_model", side_effect=InputError("stopped"))
    with stopped as loading, pytest.raises(InputError, match="stopped"):
        doctor("model", dtype=dtype, device_map="cpu")
    assert loading.call_args.args[-1].dtype == loaded


def test_norms_that_are_wrong_if_decomposed_fail() -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.get_submodule("transformer.h.1.mlp.c_proj").weight.mul_(300)
    report = doctor(model, dtype="float16", input="random", num_seqs=1, seq_len=12)
    assert [what for what, passed, _ in report.checks if not passed] == ["norms decomposed in float16"]


def test_overflow_fails_and_is_written(tmp_path: Path) -> None:
    model = tiny_model("llama")
    typed = ("--input", "random", "--num-seqs", "2", "--seq-len", "12", "--dtype", "float16")
    model.save_pretrained(tmp_path / "fits")
    assert command_line("doctor", tmp_path / "fits", *typed).exit_code == 0
    model.get_submodule("model.layers.1.mlp.down_proj").weight.mul_(2e4)
    model.save_pretrained(tmp_path / "overflows")
    done = command_line("doctor", tmp_path / "overflows", *typed, "--out", tmp_path / "run")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (1, "sinkscope: a check failed: no overflow in float16")
    assert "at mlp_out of layer 1 (coordinate" in done.stdout
    run = Run.open(tmp_path / "run")
    outcomes = {finding.name: finding.outcome for finding in run.findings}
    assert outcomes["overflow"] == outcomes["overflow-clipped"] == outcomes["overflow-rescaled"] == Outcome.PRESENT
    assert all(finding.sentence in done.stdout for finding in run.findings)
    assert (tmp_path / "run" / "figures" / "overflow-headroom.png").is_file()
    assert (tmp_path / "run" / "index.html").is_file()


def test_logits_are_compared_in_their_dtype(tmp_path: Path) -> None:
    """One number, added to all logits of a token, changes no probability, but hides that they were in bfloat16."""
    model, ids = tiny_model("llama"), tiny_tokens(2)
    logits, path = model(ids).logits, tmp_path / "logits.npz"
    np.save(tmp_path / "ids.npy", ids.numpy())
    hidden, half = {"a": logits.bfloat16().float() + 1e-3}, logits.half()
    for arrays, dtype, passes in (
        ({"a": torch.zeros_like(logits), "logits": logits}, None, True), (hidden, None, False),
        (hidden, "bfloat16", True), ({"a": half}, None, True), ({"a": half.float()}, None, False),
    ):  # fmt: skip
        np.savez(path, **{name: array.numpy() for name, array in arrays.items()})
        options = options_of(DoctorOptions, model, {"compare": path, "input": tmp_path / "ids.npy", "dtype": dtype})
        _, passed, _ = doctors._logits(load_model(model, None, options), find_family(model), options, path)
        assert passed == passes


def test_logits_from_elsewhere(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tiny_tokens(2)
    model.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", ids.numpy())
    logits = model(ids).logits.numpy()
    shifted = logits.copy()
    shifted[1, 3:] = logits[1, 2:-1]

    def compared(**arrays: np.ndarray) -> tuple[int, str]:
        np.savez(tmp_path / "logits.npz", **arrays)
        options = ("--compare", tmp_path / "logits.npz", "--input", tmp_path / "ids.npy")
        done = command_line("doctor", tmp_path / "model", *options)
        return done.exit_code, done.stdout + done.stderr

    assert compared(logits=logits)[0] == 0
    rounded = model.bfloat16()(ids).logits.float().numpy()  # as NumPy keeps bfloat16
    status, text = compared(logits=rounded)
    assert (status, "bfloat16 explains" in text) == (0, True)
    status, text = compared(anything=shifted)
    assert status == 1
    assert "first sequence 1, position 3" in text
    nan = np.where(logits == logits.max(), np.nan, logits)
    for wrong in ({"logits": logits[:, :-1]}, {"logits": logits[..., 0]}, {"one": logits, "two": logits}, {"a": nan}):
        status, text = compared(**wrong)
        assert (status, text.count("\n")) == (2, 1)
    with pytest.raises(InputError, match="num_seqs=… does not go with compare=…"):
        doctor(tmp_path / "model", compare=tmp_path / "logits.npz", input=tmp_path / "ids.npy", num_seqs=1)
