"use strict";
// Trainings that differ in one setting: a metric at the end of each, by level, with the published value.

S.study = () => {
  const table = S.table("sweep_training");
  if (!table || !table.varies("level")) return null;
  const whole = table.where({ layer: -1 });
  const metrics = table.distinct("metric", whole);
  const state = { metric: metrics.includes("sink_rate") ? "sink_rate" : metrics[0] };
  const [level, seed, step, value] = ["level", "seed", "step", "value"].map((name) => table.get(name));
  const paper = new Map(S.data.levels.map(([, , name, rate, mark]) => [name, { value: rate, mark }]));
  return S.section("study", "At the end of each training", "One row for each setting in which the trainings differ.", ...S.panel((redraw) => {
    const trainings = d3.groups(table.where({ metric: state.metric }, whole), (row) => `${level[row]}\n${seed[row]}`);
    const ends = trainings.map(([, own]) => d3.greatest(own, (row) => step[row]));
    const points = ends.map((row) => ({ name: level[row], seed: seed[row], value: value[row] ?? NaN }));
    return [[S.chooseMetric(metrics, state, redraw)],
      ...S.levels(points, S.aboutMetric(state.metric), state.metric, state.metric === "sink_rate" ? paper : new Map())];
  }));
};

/** A chart and a table of a metric. points: [{name, seed, value}]; paper: level → published value (or null) and † or "". */
S.levels = (points, about, metric, paper) => {
  const names = [...new Set(points.map(({ name }) => name))];
  const means = names.map((name) => {
    const [value = NaN, deviation = null, seeds = 0] = S.data.last_steps.find((row) => row[0] === name && row[1] === metric)?.slice(2) ?? [];
    return { name, value, deviation, seeds };
  });
  const published = names.map((name) => ({ name, value: NaN, mark: "", ...paper.get(name) })).filter(({ value }) => Number.isFinite(value));
  const caption = `; strokes seeds, dots their means${published.length ? ", rings WSE’s models of 60 million parameters" : ""}` +
    (published.some(({ mark }) => mark) ? "; †: from a transcription of the paper" : "");
  const marks = (shown, at) => [
    Plot.tickX(shown, { ...at, stroke: "var(--series-1)", strokeWidth: 1.5, insetTop: 4, insetBottom: 4 }),
    Plot.dot(means.filter(({ value }) => Number.isFinite(value)), { ...at, r: 4, fill: "var(--series-1)" }),
    Plot.dot(published, { ...at, r: 5, stroke: "var(--series-2)", strokeWidth: 2 }),
  ];
  const inPaper = new Map(published.map(({ name, value, mark }) => [name, `${about.text(value)}${mark}`]));
  const rows = means.map(({ name, value, deviation, seeds }) => [name,
    `${about.text(value)}${deviation === null ? "" : ` ± ${about.text(deviation)}`}`, S.number(seeds),
    ...(published.length ? [inPaper.get(name) ?? "–"] : [])]);
  return [
    S.dotsByName({ points, names, about, caption, marks, rowHeight: 24, title: `${S.withUnit(about)} at the last step: ${about.meaning}`,
      tip: (point) => `${point.name}\nseed ${point.seed}: ${about.text(point.value)}` }),
    S.plainTable([{ label: "Level" }, { label: "Mean ± standard deviation", number: true }, { label: "Seeds", number: true },
      ...(published.length ? [{ label: "WSE", number: true }] : [])], rows, S.withUnit(about)),
  ];
};

S.OF_COMMANDS.push(S.study);

S.ON_LOAD.push(() => {
  const levels = new Map((S.data.levels ?? []).map(([settings, condition, level]) => [`${settings}\n${condition}`, level]));
  for (const table of S.tables.values()) {
    if (!levels.size || !table.has("settings", "condition")) continue;
    const [settings, condition] = ["settings", "condition"].map((name) => table.get(name));
    table.derive("level", "the setting in which this training differs from others", settings.map((own, at) => levels.get(`${own}\n${condition[at]}`) ?? null));
  }
});
