"use strict";
// By layer: the metrics of the summary, massive activations, and gradients.

/** Rows of a table as points, grouped by arm and by the values of some more columns. */
S.points = (table, rows, x, y, more = []) => {
  const labels = S.armLabels(table);
  const groups = more.filter((name) => table.varies(name)).map((name) => table.get(name));
  return rows.map((row) => ({
    x: table.get(x)[row], y: table.get(y)[row],
    group: [labels[row], ...groups.map((values) => S.value(values[row]))].filter(Boolean).join(" · "),
  }));
};

S.layers = () => {
  const table = S.table("summary");
  if (!table) return null;
  const ofLayers = table.ofLayers.filter((row) => table.get("value")[row] !== null);
  const whole = S.wholeModel(table);
  const metrics = table.distinct("metric", ofLayers);
  if (!metrics.length && !whole) return null;
  const state = { metric: metrics.includes("sink_rate") ? "sink_rate" : metrics[0], chosen: {} };
  const panel = metrics.length ? S.panel((redraw) => {
    const about = S.aboutMetric(state.metric);
    const own = table.where({ metric: state.metric }, ofLayers);
    const { rows, selects } = S.narrowed(table, ["layer", ...S.armColumns(table)], state.chosen, redraw, own);
    return [[S.chooseMetric(metrics, state, redraw), ...selects], S.lines({
      points: S.points(table, rows, "layer", "value"), x: { label: "layer" }, y: about,
      title: `${S.withUnit(about)} by layer: ${about.meaning}`,
    })];
  }) : [];
  return S.section("layers", "By layer", "Metrics of each layer, and of the whole model.", ...panel, whole ?? "");
};

/** Metrics of the whole model, a column for each run. */
S.wholeModel = (table) => {
  const rows = table.where({ layer: -1 });
  if (!rows.length) return null;
  const labels = S.runLabels(table);
  const arms = [...new Set(rows.map((row) => labels[row]))];
  const metrics = table.distinct("metric", rows);
  const found = new Map(rows.map((row) => [`${table.get("metric")[row]} ${labels[row]}`, table.get("value")[row]]));
  const make = () => S.plainTable(
    [{ label: "Metric" }, ...arms.map((arm) => ({ label: arm || "Value", number: true })), { label: "Definition" }],
    metrics.map((metric) => {
      const about = S.aboutMetric(metric);
      return [S.data.metrics[metric]?.label ?? about.label,
        ...arms.map((arm) => about.text(found.get(`${metric} ${arm}`) ?? NaN)), about.meaning];
    }), "Metrics of the whole model");
  return S.numbers(make, `Metrics of the whole model (${metrics.length})`);
};

// --- massive activations

S.massive = () => {
  const table = S.table("massive");
  if (!table) return S.norms();
  const [layer, value, isMassive] = ["layer", "value", "is_massive"].map((name) => table.get(name));
  const labels = S.armLabels(table), arms = [...new Set(labels)];
  const state = { color: "position", only: isMassive.some(Boolean), arm: arms[0] };
  const layers = table.distinct("layer").filter((layer) => layer >= 0);
  const panel = S.panel((redraw) => {
    const rows = table.all.filter((row) => labels[row] === state.arm && (!state.only || isMassive[row]));
    const colors = table.get(state.color);
    const frequent = d3.rollups(rows, (own) => own.length, (row) => colors[row]).sort((a, b) => b[1] - a[1]).slice(0, 7).map(([color]) => color);
    const names = [...frequent.map((color) => `${state.color} ${color}`), `other ${state.color}s`];
    const nameOf = (row) => names[frequent.includes(colors[row]) ? frequent.indexOf(colors[row]) : frequent.length];
    const largest = d3.rollups(rows, (own) => d3.greatest(own, (row) => Math.abs(value[row])), (row) => layer[row], nameOf);
    const points = largest.flatMap(([x, own]) => own.map(([group, row]) => ({ x, y: Math.abs(value[row]), group })));
    points.sort((a, b) => d3.ascending(names.indexOf(a.group), names.indexOf(b.group)) || a.x - b.x);
    const controls = [arms.length > 1 ? S.choose("Arm", arms, state, "arm", redraw) : null,
      S.choose("Colored by", ["position", "coordinate"], state, "color", redraw),
      S.checkbox("Only massive activations (|value| > 100 and at least 1000 × the median)", state.only,
        (only) => { state.only = only; redraw(); })];
    return [controls, S.lines({ points, x: { label: "layer", all: layers }, y: { label: "largest |entry|", unit: "", text: S.number }, dots: true,
      log: true, title: `Largest |entry| of the layer's output, by ${state.color}` }), S.massivePlaces(table, rows)];
  });
  return S.section("massive", "Massive activations", "The largest entries of the residual stream.", S.leftOut(table), ...panel, S.normMap());
};

/** The coordinates and positions of massive activations, with their layers and the largest value. */
S.massivePlaces = (table, rows) => {
  const [coordinate, position, layer, value] = ["coordinate", "position", "layer", "value"].map((name) => table.get(name));
  const groups = d3.groups(rows, (row) => `${coordinate[row]} ${position[row]}`)
    .map(([, own]) => ({ own, largest: d3.greatest(own, (row) => Math.abs(value[row])) }))
    .sort((a, b) => b.own.length - a.own.length).slice(0, 12);
  if (!groups.length) return S.element("p.note", {}, "No entry is a massive activation.");
  return S.plainTable(
    [{ label: "Coordinate", number: true }, { label: "Position", number: true }, { label: "Entries", title: "of all sequences and layers", number: true },
      { label: "Layers" }, { label: "Largest value", number: true }, { label: "Its token" }],
    groups.map(({ own, largest }) => [S.number(coordinate[largest]), S.number(position[largest]), S.number(own.length),
      S.range(own.map((row) => layer[row])), S.number(value[largest]),
      S.visible(table.get("token")[largest])]), "Coordinates and positions with the most entries, counted over sequences and layers");
};

/** «3–9», or the only value. */
S.range = (values) => [...new Set(d3.extent(values))].join("–");

/** Norms of the residual stream, layer × position. */
S.normMap = () => {
  const table = S.table("activation");
  if (!table || S.isOfSeveral(table)) return null;
  const sites = table.distinct("site");
  const state = { site: sites.includes("layer_out") ? "layer_out" : sites[0] };
  const about = S.aboutColumn(table.byName.get("norm_mean"));
  return S.element("div", {}, S.element("h3", {}, "Norms of the residual stream"), ...S.panel((redraw) => {
    const rows = table.where({ site: state.site }, table.ofLayers);
    const scale = S.colorScale(rows.map((row) => table.get("norm_mean")[row]));
    return [[S.choose("Site", sites, state, "site", redraw)], S.colorLegend(scale, { ...about, label: about.meaning }),
      S.mapOf(table, rows, "layer", "position", "norm_mean", { scale, title: `Norm of ${state.site} by layer and position` }),
      S.element("p.note", {}, `site: ${table.byName.get("site").about}`)];
  }));
};

S.norms = () => {
  const map = S.normMap();
  return map ? S.section("massive", "The residual stream", "", map) : null;
};

// --- gradients

/** The gain of the gradient in each branch, and its norm by pathway. */
S.gradients = () => {
  const chain = S.gradientChain(), pathways = S.gradientPathways();
  if (!chain && !pathways) return null;
  return S.section("gradient", "Gradient", "The gradient of the loss on its way back through the layers.",
    chain ?? "", pathways ?? "");
};

S.gradientChain = () => {
  const table = S.table("gradient_ratio");
  if (!table) return null;
  const chosen = {};
  return S.element("div", {}, S.element("h3", {}, "Gains along the chain"), ...S.panel((redraw) => {
    const { rows, selects } = S.narrowed(table, ["layer", ...S.armColumns(table)], chosen, redraw, table.ofLayers);
    return [selects, ...table.values.map((column) => {
      const about = S.aboutColumn(column);
      return S.lines({ points: S.points(table, rows, "layer", column.name), x: { label: "layer" },
        y: { label: about.label, unit: column.unit, text: S.number }, height: 200, title: `${about.label}: ${column.about}` });
    })];
  }, "div.grid"));
};

S.gradientPathways = () => {
  const table = S.table("gradient");
  const all = table?.where({ head: -1 });
  if (!all?.length) return null;
  const chosen = {};
  return S.element("div", {}, S.element("h3", {}, "Gradient by pathway"), ...S.panel((redraw) => {
    const { rows, selects } = S.narrowed(table, ["layer", ...S.distinguishedBy(table, "pathway")], chosen, redraw, all);
    return [selects, S.lines({ points: S.points(table, rows, "layer", "grad_norm", ["pathway"]), x: { label: "layer" },
      y: { label: "gradient norm", unit: "", text: S.number }, distinguishedBy: table.byName.get("pathway"),
      title: "Gradient norm of queries, keys and values, all heads together" })];
  }));
};
