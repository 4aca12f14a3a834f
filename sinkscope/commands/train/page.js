"use strict";
// Effects of interventions and of their controls, and training by step.

S.effects = () => {
  const table = S.table("effect");
  if (!table) return null;
  const whole = table.where({ layer: -1 });
  const metrics = table.distinct("metric", whole);
  const state = { metric: metrics.includes("sink_rate") ? "sink_rate" : metrics[0], position: 0 };
  return S.section("effects", "Before, after and control", "Each intervention on the whole model, with random changes of the same kind.", ...S.panel((redraw) => {
    const about = S.aboutMetric(state.metric);
    const rows = table.where({ metric: state.metric }, whole);
    const positions = table.distinct("position", rows);
    if (!positions.includes(state.position)) state.position = S.usual("position", positions);
    const name = S.manifest.arms ? "condition" : "name"; // a label is shorter than an arm's parameters
    const points = table.where({ position: state.position }, rows).map((row) => ({ name: table.get(name)[row],
      arm: table.get("arm")[row], draw: table.get("draw")[row], value: table.get("value")[row] }));
    const controls = [S.chooseMetric(metrics, state, redraw),
      positions.length > 1 ? S.choose("Position", positions, state, "position", redraw) : null];
    return [controls, S.effectChart(points, about), S.effectTable(points, about, state)];
  }));
};

S.effectChart = (points, about) => S.dotsByName({
  points, about, names: [...new Set(points.map(({ name }) => name))], rowHeight: 26,
  title: `${S.withUnit(about)} of the whole model, by intervention`, caption: ": ring before, diamond after, strokes random controls",
  marks: (shown, at) => {
    const of = (arm) => shown.filter((point) => point.arm === arm);
    const changes = d3.groups(shown, ({ name }) => name).map(([name, own]) =>
      ({ name, ...Object.fromEntries(own.filter(({ arm }) => arm !== "control").map(({ arm, value }) => [arm, value])) }));
    return [
      Plot.link(changes.filter(({ before, after }) => before !== undefined && after !== undefined),
        { x1: "before", x2: "after", y1: "name", y2: "name", strokeOpacity: 0.5 }),
      Plot.tickX(of("control"), { ...at, stroke: "var(--series-7)", strokeWidth: 1.5, insetTop: 4, insetBottom: 4 }),
      Plot.dot(of("before"), { ...at, r: 5, stroke: "var(--series-1)", strokeWidth: 2, fill: "var(--background)" }),
      Plot.dot(of("after"), { ...at, r: 5, fill: "var(--series-2)", symbol: "diamond" }),
    ];
  },
  tip: (point) => `${point.name}\n${point.arm}${point.draw >= 0 ? ` ${point.draw}` : ""}: ${about.text(point.value)}`,
});

S.effectTable = (points, about, state) => {
  const rows = d3.groups(points, ({ name }) => name).map(([name, own]) => {
    const of = (arm) => about.text(own.find((point) => point.arm === arm)?.value ?? NaN);
    const [mean, deviation, count] = S.data.controls.find((row) =>
      row[0] === name && row[1] === state.metric && row[2] === state.position)?.slice(3) ?? [];
    const spread = count > 1 ? ` ± ${about.text(deviation)}` : "";
    return [name, of("before"), of("after"), count ? `${about.text(mean)}${spread} (${count})` : "–"];
  });
  return S.plainTable([{ label: "Intervention" }, { label: "Before", number: true }, { label: "After", number: true },
    { label: "Controls: mean ± standard deviation (count)", number: true }], rows, S.withUnit(about));
};

/** The parts of each model that carry the sink. */
S.routes = () => {
  const table = S.table("route");
  if (!table) return null;
  const models = table.distinct("model");
  const all = table.all.map((at) => table.row(at));
  const cell = (row) => (row && row.after !== null
    ? `${S.interval(row.before, row.before_low, row.before_high)} → ${S.interval(row.after, row.after_low, row.after_high)}: ${row.effect}`
    : row?.effect ?? "–");
  return S.section("routes", "Routes", "Sink rate at position 0 in % [95 %], before → without each part of the model, and the effect.",
    S.plainTable([{ label: "Route" }, ...models.map((model) => ({ label: S.visible(model) }))],
      table.distinct("route").map((route) => [route, ...models.map((model) =>
        cell(all.find((row) => row.route === route && row.model === model)))]), "Routes by model"));
};

/** Tables with values by step: a slider moves through the training. */
S.stepTables = () => [...S.tables.values()].filter((table) =>
  table.length && table.varies("step") && table.has("metric", "value") && !(table.name === "summary" && S.table("series")));

S.training = () => {
  const tables = S.stepTables();
  if (!tables.length) return null;
  return S.section("training", "By training step", "Move the slider to read the values at a step.",
    ...tables.map((table) => S.byStep(table)));
};

S.byStep = (table) => {
  const rowsOf = (metric) => table.where({ metric, ...(table.varies("layer") ? { layer: state.layer } : {}) });
  const layers = table.distinct("layer");
  const metrics = table.distinct("metric");
  const steps = table.distinct("step");
  const state = { step: steps.at(-1), layer: layers.includes(-1) ? -1 : layers[0], metric: S.usual("metric", metrics) };
  const chart = S.element("div"), values = S.element("div", { "aria-live": "polite" });

  const found = new Map(); // "metric layer" → points
  const points = (metric) => {
    const key = `${metric} ${state.layer}`;
    if (!found.has(key)) {
      const rows = rowsOf(metric), seeds = table.varies("seed") ? table.get("seed") : null;
      found.set(key, S.points(table, rows, "step", "value").map((point, at) => ({ ...point, line: seeds ? `seed ${seeds[rows[at]]}` : "" })));
    }
    return found.get(key);
  };
  const arms = [...new Set(metrics.flatMap((metric) => points(metric).map(({ group }) => group)))];
  state.arms = arms.slice(0, S.MOST_COLORS);
  const redraw = () => {
    const about = S.aboutMetric(state.metric);
    chart.replaceChildren(S.lines({ points: points(state.metric).filter(({ group }) => state.arms.includes(group)), x: { label: "step" },
      y: about, rule: state.step, title: `${S.withUnit(about)} by step: ${about.meaning}` }));
    read();
  };
  const read = () => {
    const now = new Map(metrics.map((metric) => [metric, points(metric).filter((point) => point.x === state.step && point.y !== null)]));
    const cell = (metric, arm) => now.get(metric).filter(({ group }) => group === arm)
      .map((point) => S.aboutMetric(metric).text(point.y)).join(" / ") || "–";
    const known = metrics.filter((metric) => now.get(metric).length);
    const label = (metric) => S.withUnit(S.aboutMetric(metric));
    const numbers = (labels) => labels.map((one) => ({ label: one || "Value", number: true }));
    const caption = `${table.name} at step ${S.number(state.step)}${table.varies("seed") ? ", seeds between strokes" : ""}`;
    const isLong = state.arms.length > known.length; // more arms than metrics: one row per arm
    values.replaceChildren(isLong
      ? S.plainTable([{ label: "Arm" }, ...numbers(known.map(label))],
        state.arms.map((arm) => [arm, ...known.map((metric) => cell(metric, arm))]), caption)
      : S.plainTable([{ label: "Metric" }, ...numbers(state.arms)],
        known.map((metric) => [label(metric), ...state.arms.map((arm) => cell(metric, arm))]), caption));
  };
  redraw();
  return S.element("div", {}, S.element("h3", {}, `Table ${table.name}`), S.element("div.controls", {},
    S.chooseMetric(metrics, state, redraw),
    layers.length > 1 ? S.choose("Layer", layers, state, "layer", redraw, (layer) => (layer < 0 ? "whole model" : String(layer))) : "",
    S.slider("Step", steps, state.step, (step) => { state.step = step; redraw(); })),
  arms.length > S.MOST_COLORS ? S.several(`Shown, of ${arms.length}`, arms, state.arms, (now) => { state.arms = now; redraw(); }) : "", chart, values, S.leftOut(table) ?? "");
};
