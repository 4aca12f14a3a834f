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
    const points = ends.map((row) => ({ level: level[row], seed: seed[row], value: value[row] ?? NaN }));
    return [[S.chooseMetric(metrics, state, redraw)],
      ...S.levels(points, S.aboutMetric(state.metric), state.metric, state.metric === "sink_rate" ? paper : new Map())];
  }));
};

/** A chart and a table of a metric. points: [{level, seed, value}]; paper: level → published value (null if there is none) and † or "". */
S.levels = (points, about, metric, paper) => {
  const names = [...new Set(points.map((point) => point.level))];
  const means = names.map((level) => {
    const [value = NaN, deviation = null, seeds = 0] = S.data.last_steps.find((row) => row[0] === level && row[1] === metric)?.slice(2) ?? [];
    return { level, value, deviation, seeds };
  });
  const published = names.map((level) => ({ level, value: NaN, mark: "", ...paper.get(level) })).filter(({ value }) => Number.isFinite(value));
  const shown = points.filter(({ value }) => Number.isFinite(value));
  const isLog = S.isLog(shown.map(({ value }) => value));
  const title = `${S.withUnit(about)} at the last step: ${about.meaning}`;
  const isMarked = published.some(({ mark }) => mark);
  const key = `strokes seeds, dots their means${published.length ? ", rings WSE’s models of 60 million parameters" : ""}` +
    (isMarked ? "; †: from a transcription of the paper" : "");
  const height = 64 + names.length * 24;
  const draw = (width) => {
    const narrow = width < 560, at = { x: "value", y: "level" };
    const characters = Math.min(d3.max(names, ({ length }) => length), narrow ? 20 : 44);
    return S.plot({
      width, height, marginLeft: 24 + 7.5 * characters, marginTop: 10, marginBottom: 44, ariaLabel: title,
      x: { label: S.withUnit(about), labelOffset: 36, grid: true, type: isLog ? "log" : "linear", zero: !isLog && S.isShare(about),
        tickFormat: S.tick(about), ticks: narrow ? 3 : 6 },
      y: { domain: names, label: null, tickFormat: (name) => S.shorten(name, characters) },
      marks: [
        Plot.tickX(shown, { ...at, stroke: "var(--series-1)", strokeWidth: 1.5, insetTop: 4, insetBottom: 4 }),
        Plot.dot(means.filter(({ value }) => Number.isFinite(value)), { ...at, r: 4, fill: "var(--series-1)" }),
        Plot.dot(published, { ...at, r: 5, stroke: "var(--series-2)", strokeWidth: 2 }),
        Plot.tip(shown, Plot.pointer({ ...at, fill: "var(--panel)", stroke: "var(--line)",
          title: (point) => `${point.level}\nseed ${point.seed}: ${about.text(point.value)}` })),
      ],
    });
  };
  const inPaper = new Map(published.map(({ level, value, mark }) => [level, `${about.text(value)}${mark}`]));
  const rows = means.map(({ level, value, deviation, seeds }) => [level,
    `${about.text(value)}${deviation === null ? "" : ` ± ${about.text(deviation)}`}`, S.number(seeds),
    ...(published.length ? [inPaper.get(level) ?? "–"] : [])]);
  return [
    S.element("figure", { role: "group", "aria-label": title },
      S.element("figcaption", {}, ...S.sentence(title), `; ${key}`), S.drawn(draw, { height })),
    S.plainTable([{ label: "Level" }, { label: "Mean ± standard deviation", number: true }, { label: "Seeds", number: true },
      ...(published.length ? [{ label: "WSE", number: true }] : [])], rows, S.withUnit(about)),
  ];
};
