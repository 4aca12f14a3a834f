"use strict";
// Single measurements: for each a sentence on what it means, its findings, and charts of its tables.

// charts: {table, columns: column → its label, title, y: the label of the axis, x: the horizontal column if it is not the
// layer, by: the column that distinguishes the lines of a run without arms}
S.TOPICS = [
  { id: "entropy", title: "Entropy of the states", findings: ["state-entropy"],
    about: "How many directions the states of a text’s tokens have: 1 if they have all, almost 0 if they lie along one. Layers with low entropy are called a compression valley.",
    charts: [{ table: "entropy", title: "Entropy of each layer’s states, as a share of the largest possible", y: "entropy", columns: { entropy: "all tokens", entropy_without_first: "without the first token", entropy_rescaled: "first token at the median norm" } }] },
  { id: "sink-tokens", title: "Secondary sinks", findings: ["secondary-sinks"],
    about: "Later tokens whose states take the direction of the first sink for a part of the layers, and then receive attention, too.",
    charts: [{ table: "parallel_tokens", title: "Share of the other tokens in the direction of the first sink", y: "share of tokens", columns: { parallel: "in its direction (|cosine| > 0.9)", sinks: "and with three times the median norm" } }] },
  { id: "residual-sinks", title: "Residual sinks and spikes", findings: ["residual-sinks", "spike"],
    about: "A residual sink is a coordinate that is large at most tokens. A spike is a token whose state is far larger than all others.",
    charts: [{ table: "spikes", title: "Largest share of the tokens at which one coordinate is large", y: "share of tokens", columns: { largest_share: "as it is", rotated_share: "after a random rotation" } },
    { table: "spikes", title: "Norm of a sequence’s largest token, in units of the median norm", y: "ratio", columns: { norm_ratio: "" } },
    { table: "spikes", title: "Cosine of two sequences’ tokens", y: "cosine", columns: { cosine: "the largest tokens", cosine_of_others: "tokens of the median norm" } }] },
  { id: "super-weights", title: "Super weights", findings: ["super-weight"],
    about: "A super weight is one entry of a weight matrix that writes most of a massive activation.",
    charts: [{ table: "super_weights", title: "Largest entry that each feed-forward network adds", y: "entry", columns: { written: "" } }] },
  { id: "dormant-heads", title: "Dormant heads", findings: ["dormant-heads"],
    about: "Heads that add little: they attend to the first token, and their output is small.",
    charts: [{ table: "head_scores", title: "Norm of each head’s output ÷ mean of its layer, by its attention to the first token", y: "relative norm", x: "first_mass", columns: { relative_norm: "" } }] },
  { id: "over-mixing", title: "Over-mixing", findings: ["over-mixing"],
    about: "How much one changed token changes the states of later tokens. The sink is thought to keep tokens from mixing too much.",
    charts: [{ table: "over_mixing", title: "Change of later tokens’ states, as a share of their norm", y: "change", by: "distance", columns: { change: "" } }] },
];

S.topic = ({ id, title, about, findings, charts }) => {
  const known = charts.filter(({ table, x = "layer", by = x, columns }) => S.table(table)?.has(x, by, ...Object.keys(columns)));
  if (!known.length) return null;
  const found = S.data.findings.filter(({ name }) => findings.includes(name));
  return S.section(id, title, about, found.length ? S.element("ul.findings", {}, ...found.map(S.finding)) : "",
    ...known.flatMap((chart) => S.topicChart(S.table(chart.table), chart)));
};

/** A line for each of the columns and for each arm, or dots. */
S.topicChart = (table, { columns, title, y, x = "layer", by = null }) => {
  const chosen = {}, lines = S.distinguishedBy(table, by).filter(Boolean), more = lines.includes(by) ? [by] : [];
  return S.panel((redraw) => {
    const all = S.ofShownArms(table, table.ofLayers);
    const { rows, selects } = x === "layer" ? S.narrowed(table, [x, ...lines], chosen, redraw, all) : { rows: all, selects: [] };
    const points = Object.entries(columns).flatMap(([name, label]) => S.points(table, rows, x, name, more)
      .map((point) => ({ ...point, group: [label, point.group].filter(Boolean).join(" · ") })));
    return [selects, S.lines({ points, x: { label: S.aboutColumn(table.byName.get(x)).label }, y: { label: y, unit: "", text: S.number },
      dots: x !== "layer", height: 200, title, distinguishedBy: more.length ? table.byName.get(by) : null })];
  });
};
