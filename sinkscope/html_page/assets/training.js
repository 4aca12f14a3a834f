"use strict";
// Values by training step.

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
