"""Tables in a page: the same numbers to six digits, and a description of rows that are left out."""

import json
from math import inf, nan

import pandas as pd
import pytest
from support.pages import expanded

from sinkscope.html_page.compact import as_json, compact_column, compact_tables, cut
from sinkscope.results.tables import Column


@pytest.mark.parametrize(
    ("values", "kind", "shown"),
    [
        ([0.1, 1 / 3, -2e-9, 123456789.0, 0.0], "number", [0.1, 0.333333, -2e-9, 123457000.0, 0.0]),
        ([nan, inf, -inf, 1.0], "number", [None, inf, -inf, 1]),
        ([5.0] * 9, "number", [5] * 9),
        ([0, 1, 123456789], "whole", [0, 1, 123456789]),
        ([True, False], "truth", [1, 0]),
        (["a", "b", None, "a"], "text", ["a", "b", None, "a"]),
        (
            ["</script><script>alert(1)</script>", "\ud800", ""],
            "text",
            ["</script><script>alert(1)</script>", "\ud800", ""],
        ),
        ([], "number", []),
    ],
)
def test_a_column_comes_back(values: list, kind: str, shown: list) -> None:
    text = compact_column(pd.Series(values, dtype=object if kind == "text" else None), kind)
    assert expanded(json.loads(text)) == shown
    assert "<" not in text
    assert text.isascii()


def test_equal_values_are_counted_and_json_cannot_end_its_script() -> None:
    assert compact_column(pd.Series([3, 3, 3, 3, 4]), "whole") == '{"runs":[3,4,4,1]}'
    assert as_json({"<!--": "</script>"}) == '{"\\u003c!--":"\\u003c/script>"}'


def test_a_table_is_cut_after_a_complete_sequence_or_position_or_after_its_first_rows() -> None:
    by_sequence = pd.DataFrame({"sequence": [0, 1, 2] * 4, "value": range(12)}).sort_values("sequence")
    kept, left_out = cut(by_sequence, 100, 9)
    assert kept["sequence"].value_counts().to_dict() == {0: 4, 1: 4}
    assert left_out == "only the rows of sequence 0 to 1 are here, 2 of 3"

    arms = pd.DataFrame({"run": ["a"] * 3 + ["b"] * 3, "position": [0, 1, 2] * 2, "value": range(6)})
    kept, left_out = cut(arms, 5, 1)
    assert kept["value"].tolist() == [0, 1, 3, 4]
    assert left_out == "only the rows of position 0 to 1 are here, 2 of 3"

    kept, left_out = cut(pd.DataFrame({"value": range(2000)}), 1500, 1)
    assert (len(kept), left_out) == (1500, "only the first 1,500 rows are here")
    assert cut(kept, 1500, 1)[1] == ""


def test_tables_are_cut_until_they_fit_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.html_page.compact.LARGEST", 9_000)
    table = pd.DataFrame({"sequence": range(20_000), "value": 0.123456})
    (found,) = json.loads(compact_tables({"long": table}, {"long": (Column("value", "meaning", "nats"),)}))
    assert found["rows"] == 20_000
    assert found["left_out"] == "only the rows of sequence 0 to 999 are here, 1000 of 20000"
    assert found["columns"][1] == {
        "name": "value", "about": "meaning", "unit": "nats", "kind": "number", "values": {"runs": [0.123456, 1000]},
    }  # fmt: skip
