"""`doctor`: the facts, checks and notes of its report."""

from pathlib import Path

import pytest
from support.every_model import tiny_of
from support.retrofit_command import command_line
from tiny import tiny_model

from sinkscope.attention import seam
from sinkscope.commands.doctor import doctor
from sinkscope.interventions import INTERVENTIONS
from sinkscope.measuring.observables import OBSERVABLES


def test_the_doctor_lists_what_applies_and_notes_only_what_is_expected() -> None:
    report = doctor(tiny_model("llama"))
    unexpected = [name for kinds in (OBSERVABLES, INTERVENTIONS) for name, kind in kinds.items() if not kind.expected]
    assert "gate" in unexpected
    assert not [note for note in report.notes if note.split(" does not apply")[0] in unexpected]
    assert "query-bias does not apply: its queries have no bias" in report.notes
    observables, interventions = (report.facts[kind].split(", ") for kind in ("observables", "interventions"))
    assert ("attention" in observables, "gate" in observables) == (True, False)
    assert ("mask-sink" in interventions, "nullify-query-bias" in interventions) == (True, False)


def test_a_failed_check_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    assert command_line("doctor", tmp_path).exit_code == 0
    monkeypatch.setattr("sinkscope.commands.doctor.Report.ok", False)
    done = command_line("doctor", tmp_path)
    assert (done.exit_code, done.stderr.startswith("sinkscope: a check failed")) == (1, True)


@pytest.mark.parametrize("model_type", ["gpt_oss", "granite_swa"])
def test_a_learned_sink_is_compared_by_what_reaches_the_values(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """granite_swa's eager attention returns its weights before it multiplies the output by 1 − the sink's share."""
    assert doctor(tiny_of(model_type)).ok
    own = seam.attend
    monkeypatch.setattr(seam, "attend", lambda *args, s_aux=None, **kwargs: own(*args, **kwargs))
    wrong = [what for what, passed, _ in doctor(tiny_of(model_type)).checks if not passed]
    assert "attention to position 0 equals transformers' eager attention" in wrong
