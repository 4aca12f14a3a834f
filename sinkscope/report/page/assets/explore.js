"use strict";
// Any table as a chart: what is across, what is up, and what is told apart by color.

S.chartable = () => [...S.tables.values()].filter((table) =>
  table.length > 1 && table.values.length && table.keys.some(({ name }) => table.varies(name)));

S.explore = () => {
  const tables = S.chartable();
  if (!tables.length) return null;
  const ofCells = tables.find((table) => table.name.startsWith("sweep")) ?? tables.find((table) => table.name.startsWith("comparison"));
  const state = { table: ofCells ?? tables[0] };
  const place = S.element("div"), controls = S.element("div.controls");

  const choose = (table) => {
    const keys = table.keys.map(({ name }) => name).filter((name) => table.varies(name) && name !== "metric");
    const values = table.values.map(({ name }) => name);
    const numeric = keys.filter((name) => typeof table.distinct(name)[0] === "number");
    state.table = table;
    state.y = values.includes("value") ? "value" : values[0];
    state.x = ["layer", "step", "position", "seq_len"].find((name) => numeric.includes(name)) ?? numeric[0] ?? keys[0];
    state.color = keys.find((name) => name !== state.x && !numeric.includes(name)) ?? "";
    state.keys = {};
    Object.assign(state, { keyNames: keys, valueNames: values });
    redraw();
  };

  const redraw = () => {
    const { table } = state;
    const named = (name) => name.replaceAll("_", " ");
    const used = [state.x, state.color, "token", "token_id"];
    controls.replaceChildren(
      S.pick("Table", tables, table, choose, ({ name }) => name),
      S.pick("Up", state.valueNames, state.y, (name) => { state.y = name; redraw(); }, named),
      S.pick("Across", state.keyNames, state.x, (name) => { state.x = name; redraw(); }, named),
      S.pick("Color", ["", ...state.keyNames], state.color, (name) => { state.color = name; redraw(); }, (name) => named(name) || "none"),
      ...S.keyControls(table, used, state.keys, draw));
    draw();
  };

  const draw = () => {
    const { table, x, y, color } = state;
    const wanted = Object.fromEntries(Object.entries(state.keys).filter(([name]) => name !== x && name !== color));
    const rows = table.where(wanted);
    const metric = table.has("metric") ? wanted.metric ?? table.distinct("metric")[0] : y;
    const about = y === "value" ? S.aboutMetric(metric) : S.aboutColumn(table.byName.get(y));
    const points = rows.map((row) => ({ x: table.get(x)[row] ?? "–", y: Number(table.get(y)[row] ?? NaN),
      group: color ? S.value(table.get(color)[row]) : "" }));
    const isText = points.some((point) => typeof point.x === "string");
    place.replaceChildren(points.length > 5000 ? S.element("p.note", {}, `${S.number(points.length)} rows: choose fewer to draw them.`)
      : S.lines({ points: isText ? points : d3.sort(points, (point) => point.x), x: { label: x.replaceAll("_", " ") }, y: about,
        dots: isText, ordinal: isText, title: `${S.withUnit(about)}: ${about.meaning}` }),
    S.leftOut(table) ?? "");
  };
  choose(state.table);
  return S.section("explore", "Explore", "Any table as a chart: choose what is across and what is told apart by color.", controls, place);
};
