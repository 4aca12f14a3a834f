"use strict";
// Claims × models; a cell opens the numbers that decide the claim for the model.

S.MARKS = { holds: "✓", fails: "✗", inconclusive: "?", "not enough seeds": "?", "does not apply": "·", "not measured": "–" };

S.claims = () => {
  const table = S.table("claim");
  if (!table) return null;
  const all = table.all.map((at) => table.row(at));
  const models = table.distinct("model"), ids = table.distinct("claim");
  const outcomes = table.distinct("outcome");
  const found = d3.group(all, ({ claim }) => claim, ({ model }) => model);
  const place = S.element("div", { "aria-live": "polite" });
  const state = { shown: outcomes.filter((one) => one !== "not measured" && one !== "does not apply") };
  if (!state.shown.length) state.shown = outcomes;
  const body = S.element("tbody");

  const open = (id, model) => {
    place.replaceChildren(S.claim(found.get(id).get(model)));
    place.firstChild.focus();
  };
  const redraw = () => {
    const rows = ids.filter((id) => models.some((model) => state.shown.includes(found.get(id).get(model)?.[0].outcome)));
    let paper = null;
    body.replaceChildren(...rows.flatMap((id) => {
      const one = found.get(id).values().next().value[0];
      const title = one.paper === paper ? [] : [S.element("tr", {}, S.element("th.paper", { colspan: models.length + 2, scope: "rowgroup" }, S.visible(one.paper)))];
      paper = one.paper;
      return [...title, S.element("tr", {}, S.element("th", { scope: "row" }, id), S.element("td.statement", {}, one.statement),
        ...models.map((model) => {
          const own = found.get(id).get(model);
          if (!own) return S.element("td", {}, "–");
          const { outcome } = own[0];
          const null_ = { no: "so does its null", theorem: "theorem: a test of the code" }[own[0].tells];
          return S.element("td", {}, S.element(`button.outcome.${outcome.replaceAll(" ", "-")}`, { type: "button",
            "aria-label": `${id}, ${model}: ${outcome}. Show its numbers`, onclick: () => open(id, model) },
            `${S.MARKS[outcome] ?? ""} ${outcome}`),
          Number.isFinite(own[0].value) ? S.element("div.note", {}, S.interval(own[0].value, own[0].low, own[0].high)) : null,
          null_ && outcome === "holds" ? S.element("div.note", {}, null_) : null);
        }))];
    }));
  };
  redraw();
  const telling = "tells" in all[0] ? ["holds, unlike its null"] : [];
  const count = (model, is) => S.number(ids.filter((id) => found.get(id).get(model)?.some(is)).length);
  const counts = S.plainTable([{ label: "Model" }, ...[...telling, ...outcomes].map((label) => ({ label, number: true }))],
    models.map((model) => [model, ...telling.map(() => count(model, (one) => one.outcome === "holds" && one.tells === "yes")),
      ...outcomes.map((outcome) => count(model, (one) => one.outcome === outcome))]), "Number of claims by outcome");
  return S.section("claims", "Claims × models", "Statements of papers, and whether they hold here. " + (telling.length
    ? "A claim’s null is a model in which it should fail: with random weights, a random change or plain training. " : "") +
    "Below each outcome is the claim’s first number [95 % interval]; choose the outcome to see all numbers that decide it.",
    counts, S.several("Shown where a model's outcome is", outcomes, state.shown, (now) => { state.shown = now; redraw(); }),
    S.element("div.scroll.rows", { tabindex: 0, role: "region", "aria-label": "Claims by model" },
      S.element("table.matrix", {}, S.element("thead", {}, S.element("tr", {}, S.element("th", { scope: "col" }, "Claim"),
        S.element("th", { scope: "col" }, "Statement"), ...models.map((model) => S.element("th", { scope: "col" }, S.visible(model))))), body)),
    place);
};

/** The numbers of one claim for one model. */
S.claim = (parts) => {
  const [first] = parts;
  const numbers = S.plainTable(
    [{ label: "Quantity" }, { label: "Value [95 %]", number: true }, { label: "Null", number: true },
      { label: "Holds if" }, { label: "Outcome" }, { label: "Note" }],
    parts.map((one) => [one.quantity, S.interval(one.value, one.low, one.high), S.interval(one.null, one.null_low, one.null_high),
      `${one.test}${one.is_ours ? " (our threshold)" : ""}`, one.passes, one.note ?? ""]), `${first.claim}, ${first.model}`);
  const bars = parts.filter((one) => Number.isFinite(one.value)).map(S.intervalChart);
  return S.element("div.detail", { tabindex: -1 },
    S.element("h3", {}, `${first.claim}, ${S.visible(first.model)}: `, S.badge(first.outcome)),
    S.element("p", {}, `“${first.statement}” (${first.paper}, ${first.reference})`),
    first.published ? S.element("p.note", {}, `Published: ${first.published}`) : null, numbers, ...bars);
};

/** A value and its interval, with the range in which the claim holds. */
S.intervalChart = (one) => {
  const title = `${one.quantity}: ${S.interval(one.value, one.low, one.high)}; holds if ${one.test}`;
  const ends = [one.value, one.low, one.high, one.null, one.least, one.most].filter(Number.isFinite);
  const [low, high] = d3.extent(ends);
  const room = (high - low || Math.abs(high) || 1) * 0.15;
  const domain = [low - room, high + room];
  const draw = (width) => S.plot({
    width: Math.min(width, 640), height: 58, marginLeft: 20, marginRight: 20, ariaLabel: title,
    x: { domain, label: null, tickFormat: (value) => S.number(value), ticks: 5 },
    marks: [
      Plot.rect([one], { x1: Math.max(domain[0], one.least ?? -Infinity), x2: Math.min(domain[1], one.most ?? Infinity),
        fill: "var(--series-3)", fillOpacity: 0.22 }),
      Number.isFinite(one.low) ? Plot.ruleX([one.low, one.high], { y1: 0, y2: 1, strokeOpacity: 0 }) : null,
      Number.isFinite(one.low) && Number.isFinite(one.high) ? Plot.link([one], { x1: "low", x2: "high", y1: 0.5, y2: 0.5, strokeWidth: 3 }) : null,
      Plot.dot([one], { x: "value", y: 0.5, r: 5, fill: "currentColor" }),
      Number.isFinite(one.null) ? Plot.dot([one], { x: "null", y: 0.5, r: 5, stroke: "currentColor", fill: "var(--background)" }) : null,
    ],
    y: { domain: [0, 1], axis: null },
  });
  return S.element("figure", { role: "group", "aria-label": title }, S.element("figcaption.note", {}, title), S.drawn(draw, { height: 58 }));
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

S.OF_COMMANDS.push(S.claims, S.routes);
