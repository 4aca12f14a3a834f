"use strict";
// Effects of interventions and of their controls.

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

S.OF_COMMANDS.push(S.effects);
