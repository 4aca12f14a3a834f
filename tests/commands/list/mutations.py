"""Single errors in `list`, which its tests must notice."""

MUTATIONS = [
    ("families: wiring and positions", "command", "_families",
     "row.wiring, row.positions", "row.positions, row.wiring"),
    ("families: the first wiring", "command", "_families", "for row in families:", "for row in families[:1]:"),
    ("recipes: without what they reproduce", "command", "_recipes", 'content.reproduces or ""', '""'),
    ("recipes: without faulty ones", "command", "_recipes",
     'rows.append((name, f"not a recipe: {error}", ""))', "continue"),
    ("tables: without the leading columns", "command", "_tables",
     '{"(every table)": LEADING_COLUMNS, **all_tables()}', "all_tables()"),
]  # fmt: skip
