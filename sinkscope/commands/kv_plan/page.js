"use strict";
// Plans for the KV cache: what each costs by the memory that it keeps, and which heads keep all tokens.

S.plans = () => {
  const table = S.table("kv_plan"), heads = S.table("kv_heads");
  if (!table) return null;
  return S.section("kv-plan", "Plans for the KV cache", "Perplexity and retrieval against memory, both in units of the dense cache.",
    ...S.planCosts(table), heads ? S.planHeads(heads) : "");
};

S.planCosts = (table) => {
  const state = { column: "ratio" };
  const kind = (name) => name.replace(/^random (combined )?\d+$/, "random").replace(/^\d+ bits$/, "bits alone").replace(/^(fp8|int\d).*$/, "served");
  return S.panel((redraw) => {
    const about = S.aboutColumn(table.byName.get(state.column));
    const points = table.all.map((row) => ({ x: table.get("memory")[row], y: table.get(state.column)[row], group: kind(table.get("plan")[row]),
      low: table.get(`${state.column}_low`)[row], high: table.get(`${state.column}_high`)[row] }));
    return [[S.choose("Measure", ["ratio", "kept"], state, "column", redraw, (name) => S.aboutColumn(table.byName.get(name)).meaning)], S.lines({ points, x: { label: "memory ÷ dense cache" },
      y: { ...about, text: S.number }, dots: true, title: about.meaning, distinguishedBy: table.byName.get("plan") })];
  });
};

S.planHeads = (table) => {
  const plans = table.distinct("budget").flatMap((budget) => table.distinct("plan", table.where({ budget })).map((plan) => ({ budget, plan })));
  const state = { plan: plans.find(({ plan }) => plan === "combined") ?? plans[0] };
  return S.element("div", {}, S.element("h3", {}, "Heads"), ...S.panel((redraw) => {
    const rows = table.where(state.plan), { label, meaning } = S.aboutColumn(table.byName.get("score"));
    const [layer, head, windows, keys, values] = ["layer", "kv_head", "window", "key_bits", "value_bits"].map((name) => table.get(name));
    const of = new Map(rows.map((row) => [`${layer[row]} ${head[row]}`, row]));
    const kept = (row) => `, keeps ${windows[row] < 0 ? "all tokens" : `sinks and the last ${windows[row]} tokens`} on ${keys[row]} bits (values ${values[row]})`;
    const scale = S.colorScale(rows.map((row) => table.get("score")[row]));
    return [[S.choose("Plan", plans, state, "plan", redraw, ({ budget, plan }) => `${plan}, ${S.number(100 * budget)} % of the memory`)],
      S.element("p.about", {}, `${label}: ${meaning}`), S.colorLegend(scale, { label, unit: "", text: S.number }),
      S.mapOf(table, rows, "layer", "kv_head", "score", { scale, title: `${label} ${meaning}`, caption: label, maxCell: 40,
        more: (row, column) => kept(of.get(`${row} ${column}`)) })];
  }));
};

S.OF_COMMANDS.push(S.plans);
