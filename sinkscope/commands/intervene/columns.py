"""The columns of the table `effect`."""

from sinkscope.results.tables import METRIC, VALUE, Column

COLUMNS = {
    "effect": (
        Column("name", "the intervention with its parameters", kind="text"),
        Column("arm", "before, after or control", kind="text"),
        Column("draw", "number of the random control, from 0 on; -1: no control", kind="whole"),
        METRIC,
        Column("position", "watched position; -1: none", kind="whole"),
        VALUE,
    )
}
