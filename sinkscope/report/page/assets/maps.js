"use strict";
// Layer × head, or layer × position, of any column of any table that has both; runs and arms side by side.

/** Columns that can be mapped: {table, column, across}. Tables of tokens list those of interest only: no maps. */
S.mappable = () => {
  const entries = [];
  for (const table of S.tables.values()) {
    if (!table.length || !table.has("layer") || table.has("token") || table.has("metric")) continue;
    const across = ["head", "position"].find((name) => table.has(name));
    if (!across || table.distinct("layer").every((layer) => layer < 0)) continue;
    for (const column of table.values)
      if (table.get(column.name).some((value) => Number.isFinite(Number(value)) && value !== null))
        entries.push({ table, column, across });
  }
  return entries;
};

/** What tells the runs or arms of a table apart: columns of S.ARMS with several values. */
S.armColumns = (table) => S.ARMS.filter((name) => table.varies(name));

/** Label of the arm of each row. */
S.armLabels = (table) => {
  const columns = S.armColumns(table).map((name) => table.get(name));
  return d3.range(table.length).map((row) => columns.map((values) => values[row]).join(" · "));
};

/** Choices for the other keys of a table: sequence, pathway, …; `state` keeps what was chosen. */
S.keyControls = (table, used, state, changed) => {
  const keys = table.keys.map(({ name }) => name).filter((name) => !used.includes(name) && table.varies(name));
  return keys.map((name) => {
    const values = table.distinct(name);
    if (!values.includes(state[name])) state[name] = values.includes("value") ? "value" : values.includes(0) ? 0 : values[0];
    const change = (value) => { state[name] = value; changed(); };
    const label = name.replaceAll("_", " ");
    return name === "step" ? S.slider(label, values, state[name], change) : S.pick(label, values, state[name], change);
  });
};

S.leftOut = (table) =>
  table.leftOut ? S.element("p.note", {}, `Table ${table.name}: ${table.leftOut}; all are in the parquet file.`) : null;

S.mapPanel = () => {
  const entries = S.mappable();
  if (!entries.length) return null;
  const first = entries.findIndex(({ table, column }) => table.name === "attention" && column.name === "sink_rate");
  const state = { entry: entries[Math.max(0, first)], keys: {}, arms: null };
  const controls = S.element("div.controls");
  const place = S.element("div.panels");
  const note = S.element("div");

  const choices = {};
  entries.forEach(({ table, column, across }, at) => {
    const group = `${table.name} (layer × ${across})`;
    (choices[group] ??= []).push([at, S.aboutColumn(column).label]);
  });

  const redraw = () => {
    const { table, column, across } = state.entry;
    const about = S.aboutColumn(column);
    const used = ["layer", across, "kv_head", ...S.ARMS];
    const own = S.keyControls(table, used, state.keys, redrawMaps);
    const arms = [...new Set(S.armLabels(table))];
    if (!state.arms?.every((arm) => arms.includes(arm))) state.arms = arms.slice(0, 4);
    controls.replaceChildren(
      S.select("Metric", choices, entries.indexOf(state.entry), (at) => { state.entry = entries[at]; redraw(); }),
      ...own,
      arms.length > 1 ? S.several("Side by side", arms, state.arms, (now) => { state.arms = now; redrawMaps(); }) : "",
    );
    note.replaceChildren(S.element("p.about", {}, ...S.sentence(`${about.label}: ${about.meaning}. Table ${table.name}.`)),
      S.leftOut(table) ?? "");
    redrawMaps();
  };

  const redrawMaps = () => {
    const { table, column, across } = state.entry;
    const about = S.aboutColumn(column);
    const labels = S.armLabels(table);
    const wanted = Object.fromEntries(Object.entries(state.keys).filter(([name]) =>
      name !== across && table.varies(name)));
    const rows = table.where(wanted).filter((row) => table.get(across)[row] >= 0 && table.get("layer")[row] >= 0);
    const values = table.get(column.name).map((value) => (value === null ? null : Number(value)));
    const shown = rows.filter((row) => state.arms.includes(labels[row]));
    const scale = S.colorScale(shown.map((row) => values[row]));
    const layers = table.distinct("layer", rows), columns = table.distinct(across, rows);
    const [layerOf, columnOf] = [table.get("layer"), table.get(across)];
    const figures = [];
    for (const arm of state.arms) {
      const found = new Map(rows.filter((row) => labels[row] === arm).map((row) =>
        [`${layerOf[row]} ${columnOf[row]}`, values[row]]));
      const isOfHeads = across === "head";
      figures.push(S.heatmap({
        rows: layers, columns, rowName: "layer", columnName: across, scale, text: about.text,
        title: [S.withUnit(about), arm].filter(Boolean).join(", "),
        value: (layer, at) => found.get(`${layer} ${at}`) ?? null,
        pick: isOfHeads ? (layer, head) => S.openHead(layer, head) : null,
        chosen: isOfHeads ? S.head : null,
        hover: (layer, at) => figures.forEach((figure) => figure.map.outline(layer, at)),
      }));
    }
    S.headMaps = across === "head" ? figures.map((figure) => figure.map) : [];
    place.replaceChildren(S.colorLegend(scale, about), S.element("div.maps", {}, ...figures));
  };

  redraw();
  return { controls, note, place };
};
