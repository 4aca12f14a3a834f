"use strict";
// Quantization: what each setting costs, the range of each site, and which sites to keep in higher precision.

S.quantization = () => {
  const settings = S.table("quantization"), sites = S.table("quantization_sites"), split = S.table("quantization_split");
  const outlier = S.table("outlier"), formats = S.table("formats");
  if (formats)
    return S.section("quantization", "Number formats", "What the formats that are served cost, and how much of it sink tokens have.",
      S.formatCosts(formats), S.cures(S.table("formats_cures")) ?? "", S.sparedModules(S.table("formats_modules")) ?? "");
  if (!settings && !sites && !outlier) return null;
  return S.section("quantization", "Quantization", "Outliers make one range per tensor coarse: its cost, and the sites where it arises.",
    split ? S.costSplit(split) : "", S.toSpare(settings, sites) ?? "", sites ? S.siteRanges(sites) : "", outlier ? S.outliers(outlier) : "");
};

/** The numbers of a table as text: one cell, and one with the ends of its interval. */
S.numbersOf = (table) => {
  const cell = (name, row) => S.number(table.get(name)[row]);
  const interval = (name, row) => Number.isFinite(table.get(name)[row])
    ? `${cell(name, row)} (${cell(`${name}_low`, row)} to ${cell(`${name}_high`, row)})` : "–";
  return { cell, interval };
};

/** What each scheme costs, with everything in its formats, weights or inputs. */
S.formatCosts = (table) => {
  const { cell, interval } = S.numbersOf(table);
  const columns = [{ label: "Scheme" }, { label: "Quantized" }, { label: "Perplexity ×", number: true },
    { label: "Cost (95 % interval)", number: true }, { label: "Sinks' share (95 % interval)", number: true },
    { label: "Random tokens' share (range)", number: true }, { label: "Difference by text (95 % interval)", number: true }];
  return S.element("div", {}, S.plainTable(columns, table.all.map((row) =>
    [S.visible(table.get("scheme")[row]), S.visible(table.get("part")[row]), cell("ratio", row), interval("cost", row),
      interval("sink_share", row), interval("random_share", row), interval("ahead", row)]), "Cost in nats per token"));
};

/** What each cure recovers, next to its control. */
S.cures = (table) => {
  if (!table) return null;
  const { cell, interval } = S.numbersOf(table);
  const columns = [{ label: "Scheme" }, { label: "Cure" }, { label: "Setting" }, { label: "Cost", number: true },
    { label: "Recovered (95 % interval)", number: true }, { label: "Control (range)", number: true },
    { label: "Difference by text (95 % interval)", number: true }];
  return S.element("div", {}, S.element("h3", {}, "Cures"), S.plainTable(columns, table.all.map((row) =>
    [S.visible(table.get("scheme")[row]), S.visible(table.get("cure")[row]), S.visible(table.get("setting")[row] || "–"),
      cell("cost", row), interval("recovered", row), interval("random_recovered", row), interval("ahead", row)]),
    "Nats per token that each cure recovers"));
};

/** The modules that are spared under each scheme. */
S.sparedModules = (table) => table && S.element("div", {}, S.element("h3", {}, "Modules in full precision"), S.plainTable(
  [{ label: "Scheme" }, { label: "Module" }, { label: "Predicted rise of the loss (nats per token)", number: true }],
  table.all.filter((row) => table.get("is_spared")[row]).map((row) =>
    [S.visible(table.get("scheme")[row]), S.visible(table.get("module")[row]), S.number(table.get("predicted")[row])]),
  "Modules that were measured in full precision"));

/** What the cost becomes with some tokens, coordinates or a prefix in full precision; a row for each random control. */
S.costSplit = (table) => {
  const cell = (name, row) => S.number(table.get(name)[row]);
  const interval = (name, row) => `${cell(name, row)} (${cell(`${name}_low`, row)} to ${cell(`${name}_high`, row)})`;
  const rows = (isControl) => table.all.filter((row) => (table.get("draw")[row] >= 0) === isControl).map((row) =>
    [S.visible(table.get("setting")[row]), cell("tokens", row), cell("coordinates", row), table.get("prefix")[row] || "–",
      cell("perplexity", row), interval("cost", row), interval("share", row)]);
  const columns = [{ label: "Spared or changed" }, { label: "Tokens", number: true }, { label: "Coordinates", number: true },
    { label: "Prefix" }, { label: "Perplexity", number: true }, { label: "Cost (95 % interval)", number: true },
    { label: "Share taken away", number: true }];
  return S.element("div", {}, S.element("h3", {}, "Tokens, coordinates, a prefix or a rotation"),
    S.plainTable(columns, rows(false), "Cost in nats per token with everything quantized"),
    S.element("details", {}, S.element("summary", {}, "Random controls"), S.plainTable(columns, rows(true), "Random controls")));
};

/** The sites that are worth keeping in full precision. */
S.toSpare = (settings, sites) => {
  const lists = [];
  const rows = settings ? settings.all.filter((row) => settings.get("kept")[row]) : [];
  if (rows.length)
    lists.push(S.plainTable(
      [{ label: "Kept", number: true }, { label: "Cost (nats per token)", number: true }, { label: "Perplexity", number: true },
        { label: "Sequences", number: true }, { label: "Sites kept in full precision" }],
      rows.map((row) => [S.number(settings.get("kept")[row].split(", ").length), S.number(settings.get("cost")[row]),
        S.number(settings.get("perplexity")[row]), S.number(settings.get("sequences")[row]), S.visible(settings.get("kept")[row])]),
      "Settings in which the costliest sites are kept"));
  const massive = sites ? sites.all.filter((row) => sites.get("is_massive")[row]) : [];
  if (massive.length)
    lists.push(S.element("details", {}, S.element("summary", {}, `Sites that hold massive activations (${massive.length})`),
      S.element("ul", {}, ...massive.map((row) => S.element("li", {}, S.element("code", {}, S.visible(sites.get("path")[row])),
        ` ${sites.get("part")[row]}, largest entry ${S.number(sites.get("max_abs")[row])}`)))));
  return lists.length ? S.element("div", {}, S.element("h3", {}, "To keep in higher precision"), ...lists) : null;
};

S.siteRanges = (table) => {
  const kinds = table.distinct("site").flatMap((site) =>
    table.distinct("part", table.where({ site })).map((part) => ({ site, part })));
  const state = { kind: kinds[0] };
  const text = ({ site, part }) => `${site} ${part}`;
  return S.element("div", {}, S.element("h3", {}, "Range of each site"), ...S.panel((redraw) => {
    const rows = table.where(state.kind, table.ofLayers);
    const points = [["max_abs", "largest |entry|"], ["median_abs", "median |entry|"],
      ["step", "step: entries below half of it are rounded to zero"]].flatMap(([name, group]) =>
      rows.map((row) => ({ x: table.get("layer")[row], y: table.get(name)[row], group })));
    return [[S.choose("Site", kinds, state, "kind", redraw, text)], S.lines({ points, x: { label: "layer" },
      y: { label: "|entry|", unit: "", text: S.number }, log: true, title: `Range of ${text(state.kind)} by layer` })];
  }));
};

S.outliers = (table) => {
  const columns = table.values.map(({ name }) => name);
  const state = { column: columns[0], chosen: {} };
  return S.element("div", {}, S.element("h3", {}, "Outliers by site"), ...S.panel((redraw) => {
    const about = S.aboutColumn(table.byName.get(state.column));
    const axes = ["layer", ...S.distinguishedBy(table, "site")];
    const { rows, selects } = S.narrowed(table, axes, state.chosen, redraw, table.ofLayers);
    return [[S.choose("Measure", columns, state, "column", redraw, (name) => name.replaceAll("_", " ")), ...selects],
      S.lines({ points: S.points(table, rows, "layer", state.column, ["site"]), x: { label: "layer" },
        y: about, title: `${about.label} by layer and site: ${about.meaning}`, distinguishedBy: table.byName.get("site") })];
  }));
};

S.OF_COMMANDS.push(S.quantization);
