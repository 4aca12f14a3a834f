"""The tables `claim` and `route` of `claims`, with their columns."""

from sinkscope.results.tables import LEADING_COLUMNS, Column

COMMAND = "claims"
CLAIM = "claim"
CLAIM_COLUMNS = (
    Column("claim", "its id (`sinkscope list claims`)", kind="text"),
    Column("paper", "paper of the claim", kind="text"),
    Column("reference", "section, figure or table of the paper", kind="text"),
    Column("statement", "statement of the claim", kind="text"),
    Column("part", "index of the number in the claim, from 0 on", kind="whole"),
    Column("quantity", "what is measured", kind="text"),
    Column("value", "the quantity; NaN if it was not measured"),
    Column("low", "lower end of its 95 % interval"),
    Column("high", "upper end of its 95 % interval"),
    Column("null", "the quantity without the effect, mean over draws; NaN if it was not measured"),
    Column("null_low", "the smallest of the draws"),
    Column("null_high", "the largest of the draws"),
    Column("test", "the values with which the claim holds", kind="text"),
    Column("least", "the smallest of these values"),
    Column("most", "the largest of these values"),
    Column("is_ours", "whether the threshold is ours and not the paper's", kind="truth"),
    Column("published", "the value of the paper, with its settings", kind="text"),
    Column("passes", "outcome of this number", kind="text"),
    Column("power", "probability that this number of seeds shows the claim if it is true; NaN: not over seeds"),
    Column("seeds_wanted", "seeds that decide the test in 80 % of studies, if effect and spread are those seen"),
    Column("outcome",
        "outcome of the claim: holds, fails, inconclusive, not enough seeds, does not apply or not measured",
        kind="text"),
    Column("set_against", "the claim's null: random weights, random controls, plain training, theorem or none",
        kind="text"),
    Column("null_passes",
        "share of the null's draws for which the claim holds, of those that define it; NaN if that was not measured"),
    Column("tells",
        "whether the claim distinguishes the model from its null: yes (no draw passes or gives as much), no, "
        "undefined (a number of the claim exists for no draw), theorem, or empty: not measured",
        kind="text"),
    Column("note", "what the number is over, why the claim does not apply, or the command to measure it", kind="text"),
)  # fmt: skip
ROUTE = "route"
ROUTE_COLUMNS = (
    Column("route", "a part of the model by which the first token may become a sink", kind="text"),
    Column("do", "the intervention that cuts it", kind="text"),
    Column("before", "sink rate at position 0 of the model as it is", "%"),
    Column("before_low", "lower end of its 95 % interval over sequences", "%"),
    Column("before_high", "upper end", "%"),
    Column("after", "sink rate at position 0 without the route", "%"),
    Column("after_low", "lower end of its 95 % interval over sequences", "%"),
    Column("after_high", "upper end", "%"),
    Column("draws", "random controls", kind="whole"),
    Column("control", "mean sink rate under the random controls", "%"),
    Column("control_low", "lower end of the 95 % interval for one more control", "%"),
    Column("control_high", "upper end", "%"),
    Column("beyond", "change of the sink rate beyond a control's", "points"),
    Column("beyond_low", "lower end of its 95 % interval, over sequences and controls", "points"),
    Column("beyond_high", "upper end", "points"),
    Column("effect", "goes, falls, rises, stays (by that interval), undecided, no sink, does not apply, not measured",
        kind="text"),
    Column("note", "why it does not apply, or the command to measure it", kind="text"),
)  # fmt: skip
COLUMNS = {CLAIM: CLAIM_COLUMNS, ROUTE: ROUTE_COLUMNS}
TABLES = {name: (*LEADING_COLUMNS, *columns) for name, columns in COLUMNS.items()}
