"use strict";
// Maps by layer and head, or layer and position, of any column of a table that has both; runs and arms side by side.

/** Columns that can be mapped: {table, column, across}. Tables of tokens list only a few tokens: they have no maps. */
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

/** The columns of S.ARMS that distinguish the runs or arms of a table, without the step. */
S.armColumns = (table) => {
  if (!table.arms) {
    const rows = table.all, step = table.has("step") ? ["step"] : [];
    table.arms = S.ARMS.filter((name) => table.varies(name)).reduce((chosen, name) =>
      (S.distinguishes(table, name, [...step, ...chosen], rows) ? [...chosen, name] : chosen), []);
  }
  return table.arms;
};

/** Whether a table holds several runs, arms or steps. */
S.isOfSeveral = (table) => S.armColumns(table).length > 0 || table.varies("step");

/** The columns that distinguish the lines of a chart: those of several arms, or else another column. */
S.distinguishedBy = (table, name) => (S.armColumns(table).length ? S.armColumns(table) : [name]);

/** The label of each row's arm; computed once. */
S.armLabels = (table) => {
  if (!table.labels) {
    const columns = S.armColumns(table).map((name) => table.get(name));
    table.labels = table.all.map((row) => columns.map((values) => values[row]).join(" · "));
  }
  return table.labels;
};

/** The different labels of arms, with random controls last. */
S.arms = (labels) => d3.sort(new Set(labels), S.isControl);

/** Whether an arm is a random control: «ARM control 2» of an ARM that run.json has. */
S.isControl = (label) => label.split(" · ").some((part) => {
  const [, arm] = part.match(/^(.*) control \d+$/) ?? [];
  return arm !== undefined && arm in (S.manifest.arms ?? {});
});

S.MOST_ARMS = 4; // side by side, before the user chooses

/** The labels with the step, for tables and charts that show all steps. */
S.runLabels = (table) =>
  table.varies("step")
    ? S.armLabels(table).map((label, row) => [label, `step ${table.get("step")[row]}`].filter(Boolean).join(" · "))
    : S.armLabels(table);

/**
 * Choices for further keys of rows: sequence, pathway, step, …
 * axes: columns that the chart shows; chosen: name → value, which is kept from one table to the next.
 * Returns the chosen rows and the controls.
 */
S.narrowed = (table, axes, chosen, changed, from = table.all) => {
  let rows = from;
  const selects = [];
  const keys = table.keys.map(({ name }) => name).filter((name) => !axes.includes(name) && table.varies(name));
  for (const name of d3.sort(keys, (key) => ({ metric: 0, layer: 1, cell: 3 })[key] ?? 2)) {
    if (!S.distinguishes(table, name, axes, rows)) continue;
    const values = table.distinct(name, rows);
    if (!values.includes(chosen[name])) chosen[name] = S.usual(name, values);
    const change = (value) => { chosen[name] = value; changed(); };
    const label = name.replaceAll("_", " ");
    const text = name === "metric" ? (metric) => S.aboutMetric(metric).label
      : name === "layer" ? (layer) => (layer < 0 ? "whole model" : String(layer)) : S.value;
    selects.push(name === "step" ? S.slider(label, values, chosen[name], change) : S.pick(label, values, chosen[name], change, text));
    rows = rows.filter((row) => table.get(name)[row] === chosen[name]);
  }
  return { rows, selects };
};

/** Whether rows with equal axes differ in a column. */
S.distinguishes = (table, name, axes, rows) => {
  const columns = axes.map((axis) => table.codes(axis)), values = table.get(name), seen = new Map();
  for (const row of rows) {
    let code = 0; // a number for each combination of values
    for (const { codes, count } of columns) code = code * count + codes[row];
    if (!seen.has(code)) seen.set(code, values[row]);
    else if (seen.get(code) !== values[row]) return true;
  }
  return false;
};

S.usual = (name, values) =>
  ["sink_rate", "layer_out", "value", "attn"].find((value) => values.includes(value)) ??
  (name === "step" ? values.at(-1) : name === "layer" && values.includes(-1) ? -1 : values.includes(0) ? 0 : values[0]);

S.leftOut = (table) =>
  table.leftOut ? S.element("p.note", {}, `Table ${table.name}: ${table.leftOut}; all are in the parquet file.`) : null;

S.mapPanel = () => {
  const entries = S.mappable();
  if (!entries.length) return null;
  const ofAttention = (name) => entries.find(({ table, column }) => table.name === "attention" && column.name === name);
  const rate = ofAttention("sink_rate"); // none at position 0 where sequences are short
  const hasRate = rate && rate.table.get("sink_rate").some((value, row) => Number.isFinite(value) && !rate.table.get("position")[row]);
  const state = { entry: (hasRate ? rate : ofAttention("window_mass")) ?? entries[0], chosen: {} };
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
    const labels = S.armLabels(table);
    const arms = S.arms(labels);
    if (!S.shownArms?.every((arm) => arms.includes(arm))) S.shownArms = arms.slice(0, S.MOST_ARMS);
    const ofLayers = table.ofLayers.filter((row) => table.get(across)[row] >= 0);
    const { rows, selects } = S.narrowed(table, ["layer", across, ...S.armColumns(table)], state.chosen, redraw, ofLayers);
    S.setControls(controls,
      S.select("Metric", choices, entries.indexOf(state.entry), (at) => { state.entry = entries[at]; redraw(); }), ...selects,
      arms.length > 1 ? S.several("Side by side", arms, S.shownArms, (now) => {
        S.shownArms = now;
        redraw();
        if (S.head) S.openHead(...S.head);
      }) : null);
    note.replaceChildren(S.element("p.about", {}, ...S.sentence(`${about.label}: ${about.meaning}. Table ${table.name}.`)),
      S.leftOut(table) ?? "");
    place.replaceChildren(...S.sideBySide(state.entry, rows, labels, about));
  };

  redraw();
  return { controls, note, place };
};

/** A map for each chosen run or arm, all with the same color scale. */
S.sideBySide = ({ table, column, across }, rows, labels, about) => {
  const arms = S.shownArms;
  const values = table.get(column.name);
  const scale = S.colorScale(rows.filter((row) => arms.includes(labels[row])).map((row) => values[row]));
  const isOfHeads = across === "head", isOfKv = isOfHeads && rows.length > 0 && S.isOfKvHead(table, rows[0]);
  const marks = [];
  const maps = arms.map((arm) => {
    const own = rows.filter((row) => labels[row] === arm);
    const model = own.length ? table.get("model")[own[0]] : "";
    const inMap = ([layer, head]) => [layer, isOfKv ? S.kvHead(model, layer, head) : head];
    const open = (layer, at) => S.openHead(layer, isOfKv ? S.firstHead(model, layer, at) : at);
    const panel = S.mapOf(table, own, "layer", across, column.name, {
      rows: table.distinct("layer", rows), columns: table.distinct(across, rows),
      columnName: isOfKv && S.groups().kvOf.size ? "key/value head" : across,
      scale, text: about.text, title: [S.withUnit(about), S.visible(arm)].filter((text) => text !== "∅").join(", "), caption: arm && S.visible(arm),
      pick: isOfHeads ? open : null, chosen: isOfHeads && S.head ? inMap(S.head) : null,
      hover: (layer, at) => maps.forEach(({ map }) => map.outline(layer, at)),
    });
    marks.push((head) => panel.map.mark(inMap(head)));
    return panel;
  });
  S.headMaps = isOfHeads ? marks : [];
  return [S.colorLegend(scale, about), S.element("div.maps", {}, ...maps)];
};
