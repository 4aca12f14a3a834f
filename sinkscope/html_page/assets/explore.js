"use strict";
// Any table as a chart: the columns for the two axes and for the color.

// tables of sentences, which have their own sections
S.IN_WORDS = new Set(["finding", "claim", "route"]);
S.MOST_COLORS = 8; // if there are more values, the first are shown until the user chooses
// columns for the horizontal axis if they vary, in the order of preference
S.ACROSS_LAYERS = ["layer", "position", "bucket", "coordinate", "sequence"];
S.ACROSS_MODELS = ["step", "seq_len", "epsilon", "input", "level", "condition", "name", "model"];

/** Columns that can be on the horizontal axis. */
S.crossable = (table) => table.keys.map(({ name }) => name).filter((name) => name !== "metric" && table.varies(name));

S.chartable = () => [...S.tables.values()].filter((table) =>
  table.length > 1 && table.values.length && !S.IN_WORDS.has(table.name) && S.crossable(table).length);

S.explore = () => {
  const tables = S.chartable();
  if (!tables.length) return null;
  const place = S.element("div"), controls = S.element("div.controls"), boxes = S.element("div");
  const state = {};

  const choose = (table) => {
    const keys = S.crossable(table);
    const isWhole = table.has("layer", "metric") && table.distinct("layer").includes(-1);
    const across = [...(isWhole ? [] : S.ACROSS_LAYERS), ...S.ACROSS_MODELS, ...(isWhole ? S.ACROSS_LAYERS : [])];
    const x = across.find((name) => keys.includes(name)) ?? keys[0];
    const distinguishes = (name) => name !== x && S.distinguishes(table, name, [x], table.all);
    const color = ["run", "level", "model", "condition", "site", "pathway"].find((name) => keys.includes(name) && distinguishes(name)) ??
      keys.find((name) => table.byName.get(name).kind === "text" && distinguishes(name)) ?? "";
    const values = table.values.map(({ name }) => name);
    Object.assign(state, { table, keys, values, x, color, y: values.includes("value") ? "value" : values[0], chosen: {} });
    redraw();
  };

  const redraw = state.redraw = () => {
    const { table, x, y, color } = state;
    const named = (name) => name.replaceAll("_", " ") || "none";
    const axes = [x, color].filter(Boolean);
    const { rows, selects } = S.narrowed(table, axes, state.chosen, redraw, x === "layer" ? table.ofLayers : table.all);
    S.setControls(controls,
      S.pick("Table", tables, table, choose, ({ name }) => name),
      S.choose("Vertical", state.values, state, "y", redraw, named), S.choose("Horizontal", state.keys, state, "x", redraw, named),
      S.choose("Color", ["", ...state.keys], state, "color", redraw, named), ...selects);
    const shown = S.chosenColors(table, rows, color, state);
    S.setControls(boxes, shown.control);
    place.replaceChildren(S.chartOf(table, shown.rows, x, y, color), S.leftOut(table) ?? "");
  };

  choose(tables.find(({ name }) => S.data.first_table && name.startsWith(S.data.first_table)) ?? tables.find(({ name }) => name === "attention") ?? tables[0]);
  return S.section("explore", "Explore", "Any table as a chart: choose the columns for the axes and for the color.", controls, boxes, place);
};

/** The rows of the values that have a color, and boxes to choose among many values. */
S.chosenColors = (table, rows, color, state) => {
  const values = color ? S.arms(table.distinct(color, rows).map(S.value)) : [];
  if (values.length <= S.MOST_COLORS) return { rows };
  if (!state.colors?.every((value) => values.includes(value))) state.colors = values.slice(0, S.MOST_COLORS);
  const own = table.get(color);
  return {
    rows: rows.filter((row) => state.colors.includes(S.value(own[row]))),
    control: S.several(`Shown, of ${values.length}`, values, state.colors, (now) => { state.colors = now; state.redraw(); }),
  };
};

S.chartOf = (table, rows, x, y, color) => {
  const about = y === "value" && table.has("metric") && rows.length
    ? S.aboutMetric(table.get("metric")[rows[0]]) : S.aboutColumn(table.byName.get(y));
  const isEstimate = table.has("low", "high") && y === table.values[0].name;
  const end = (name, row) => (isEstimate ? Number(table.get(name)[row] ?? NaN) : NaN);
  const points = rows.map((row) => ({ x: table.get(x)[row] ?? "–", y: Number(table.get(y)[row] ?? NaN),
    low: end("low", row), high: end("high", row), group: color ? S.value(table.get(color)[row]) : "" }));
  if (points.length > 5000) return S.element("p.note", {}, `${S.number(points.length)} rows: choose fewer to draw them.`);
  const isText = table.byName.get(x).kind === "text";
  return S.lines({ points: isText ? points : d3.sort(points, (point) => point.x), x: { label: x.replaceAll("_", " ") }, y: about,
    dots: isText, ordinal: isText, title: [about.label, about.meaning].filter(Boolean).join(": ") });
};
