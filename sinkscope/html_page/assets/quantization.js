"use strict";
// Quantization: what each setting costs, the range of each site, and which sites to keep in higher precision.

S.quantization = () => {
  const settings = S.table("quantization"), sites = S.table("quantization_sites");
  const outlier = S.table("outlier");
  if (!settings && !sites && !outlier) return null;
  return S.section("quantization", "Quantization", "Outliers make one range per tensor coarse: what that costs, and where.",
    S.toSpare(settings, sites) ?? "", sites ? S.siteRanges(sites) : "", outlier ? S.outliers(outlier) : "");
};

/** The sites that the run found to be worth keeping in full precision. */
S.toSpare = (settings, sites) => {
  const lists = [];
  const rows = settings ? d3.range(settings.length).filter((row) => settings.get("kept")[row]) : [];
  if (rows.length)
    lists.push(S.plainTable(
      [{ label: "Kept", number: true }, { label: "Cost (nats per token)", number: true }, { label: "Perplexity", number: true },
        { label: "Sequences", number: true }, { label: "Sites kept in full precision" }],
      rows.map((row) => [S.number(settings.get("kept")[row].split(", ").length), S.number(settings.get("cost")[row]),
        S.number(settings.get("perplexity")[row]), S.number(settings.get("sequences")[row]), S.visible(settings.get("kept")[row])]),
      "Settings in which the costliest sites are kept"));
  const massive = sites ? d3.range(sites.length).filter((row) => sites.get("is_massive")[row]) : [];
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
  const place = S.element("div");
  const redraw = () => {
    const rows = table.where(state.kind).filter((row) => table.get("layer")[row] >= 0);
    const column = (name, label, of = (value) => value) => rows.map((row) =>
      ({ x: table.get("layer")[row], y: of(table.get(name)[row]), group: label }));
    place.replaceChildren(S.lines({
      points: [...column("max_abs", "largest |entry|"), ...column("median_abs", "median |entry|"),
        ...column("step", "half a step: less rounds to zero", (step) => (step === null ? null : step / 2))],
      x: { label: "layer" }, y: { label: "|entry|", unit: "", text: S.number }, log: true,
      title: `Range of ${state.kind.site} ${state.kind.part} by layer` }));
  };
  redraw();
  return S.element("div", {}, S.element("h3", {}, "Range of each site"),
    S.element("div.controls", {}, S.pick("Site", kinds, state.kind, (kind) => { state.kind = kind; redraw(); },
      ({ site, part }) => `${site} ${part}`)), place);
};

S.outliers = (table) => {
  const columns = table.values.map(({ name }) => name);
  const state = { column: columns[0], chosen: {} };
  const place = S.element("div"), controls = S.element("div.controls");
  const ofLayers = d3.range(table.length).filter((row) => table.get("layer")[row] >= 0);
  const redraw = () => {
    const about = S.aboutColumn(table.byName.get(state.column));
    const { rows, selects } = S.narrowed(table, ["layer", ...S.toldBy(table, "site")], state.chosen, redraw, ofLayers);
    S.setControls(controls, S.pick("Measure", columns, state.column, (name) => { state.column = name; redraw(); },
      (name) => name.replaceAll("_", " ")), ...selects);
    place.replaceChildren(S.lines({ points: S.points(table, rows, "layer", state.column, ["site"]), x: { label: "layer" },
      y: about, title: `${about.label} by layer and site: ${about.meaning}`, toldBy: table.byName.get("site") }));
  };
  redraw();
  return S.element("div", {}, S.element("h3", {}, "Outliers by site"), controls, place);
};
