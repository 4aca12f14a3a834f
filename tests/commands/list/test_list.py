"""`list`: tables of names with what each register says of them."""

from pathlib import Path

import pytest

import sinkscope
from sinkscope.models.families import FAMILIES
from sinkscope.results.tables import LEADING


def test_a_family_has_a_row_for_each_of_its_wirings() -> None:
    listed = sinkscope.list("families")[["model type", "wiring", "positions"]]
    expected = [[name, row.wiring, row.positions] for name, rows in FAMILIES.items() for row in rows]
    assert listed.to_numpy().tolist() == expected


@pytest.mark.usefixtures("here")
def test_recipes_are_listed_with_what_they_reproduce_and_faulty_ones_with_their_error() -> None:
    Path("recipes").mkdir()
    Path("recipes/mine.yaml").write_text("title: Mine\nreproduces: GS figure 2")
    Path("recipes/faulty.yaml").write_text("titel: Mine")
    rows = sinkscope.list("recipes").set_index("recipe")
    assert rows.loc["mine"].tolist() == ["Mine", "GS figure 2"]
    assert rows.loc["faulty", "title"].startswith("not a recipe: recipes/faulty.yaml: key 'titel' is unknown")


def test_the_columns_of_every_table_are_listed_first() -> None:
    assert sinkscope.list("tables")["column"].tolist()[: len(LEADING)] == [*LEADING]
