"""`doctor`: the facts, checks and notes of its report."""

from pathlib import Path

import pytest
from support.retrofit_command import command_line
from tiny import tiny_model

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
