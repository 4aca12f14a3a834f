"use strict";
// One head: its attention map on a real sequence, its geometry by position, its gradient.

S.FAINTEST = 1e-3; // smallest weight with a color of its own: next to a sink all other weights are small
S.shownArms = null; // labels of the runs or arms that are side by side
S.head = null; // [layer, head] that is shown
S.headMaps = []; // functions that mark it in the maps
S.headListeners = []; // functions that show it elsewhere

S.openHead = (layer, head) => {
  S.head = [layer, head];
  S.headMaps.forEach((mark) => mark(S.head));
  S.headListeners.forEach((listener) => listener(layer, head));
};

/** Tables with rows by head and position. */
S.byHeadAndPosition = () =>
  [...S.tables.values()].filter((table) => table.length && table.has("layer", "head", "position") &&
    !table.has("token") && !table.has("sequence") && !table.has("group"));

// pathways of the gradient by key/value head, which several query heads share under GQA
S.KV_PATHWAYS = new Set(["key", "value", "raw_value"]);

/** Whether a row's head is a key/value head: in gradients of keys and values, and in a table without query heads. */
S.isOfKvHead = (table, row) => {
  if (table.has("pathway")) return S.KV_PATHWAYS.has(table.get("pathway")[row]);
  table.ofKvHeads ??= table.has("kv_head") && table.get("kv_head").every((kv, at) => kv === table.get("head")[at]);
  return table.ofKvHeads;
};

/** For grouped queries: "model layer head" → key/value head, and "model layer key/value head" → its first head. */
S.groups = () => {
  if (!S.foundGroups) {
    const [kvOf, firstOf] = [new Map(), new Map()];
    for (const table of S.tables.values()) {
      if (!table.length || !table.has("model", "layer", "head", "kv_head") || table.has("sequence")) continue;
      if (S.isOfKvHead(table, 0)) continue;
      const [model, layer, head, kv] = ["model", "layer", "head", "kv_head"].map((name) => table.get(name));
      for (let row = 0; row < table.length; row++) {
        const [place, group] = [head, kv].map((of) => `${model[row]} ${layer[row]} ${of[row]}`);
        kvOf.set(place, kv[row]);
        firstOf.set(group, Math.min(firstOf.get(group) ?? Infinity, head[row]));
      }
    }
    S.foundGroups = { kvOf, firstOf };
  }
  return S.foundGroups;
};

S.kvHead = (model, layer, head) => S.groups().kvOf.get(`${model} ${layer} ${head}`) ?? head;
S.firstHead = (model, layer, kv) => S.groups().firstOf.get(`${model} ${layer} ${kv}`) ?? kv;

/** Rows of a query head, and of the key/value head that it reads. */
S.rowsOfHead = (table, layer, head) => {
  const [model, own] = [table.get("model"), table.get("head")];
  return table.where({ layer }).filter((row) =>
    own[row] === (S.isOfKvHead(table, row) ? S.kvHead(model[row], layer, head) : head));
};

/** "key/value head 2" if query heads share the row's head. */
S.ofKvHead = (table, row) =>
  S.groups().kvOf.size && S.isOfKvHead(table, row) ? `key/value head ${table.get("head")[row]}` : "";

/** Heads with a stored map, as [layer, head]. */
S.mapped = () => [...S.rowsOfMaps().values()].map(({ pair }) => pair);

S.mapRows = (layer, head) => S.rowsOfMaps().get(`${layer} ${head}`)?.rows ?? [];

/** "layer head" → {pair, rows} of the stored maps; computed once. */
S.rowsOfMaps = () => {
  const table = S.table("attention_maps");
  if (!table || !table.has("head")) return new Map();
  if (!table.ofHeads) {
    const [layer, head] = [table.get("layer"), table.get("head")];
    const groups = d3.group(table.all, (row) => `${layer[row]} ${head[row]}`);
    table.ofHeads = new Map([...groups].map(([key, rows]) => [key, { pair: [layer[rows[0]], head[rows[0]]], rows }]));
  }
  return table.ofHeads;
};

/** The map of all heads, and the head that is chosen in it. */
S.heads = () => {
  const map = S.mapPanel(), head = S.headPanel();
  if (!map && !head) return null;
  return S.section("heads", "Layers and heads",
    "Each cell is a head of a layer; dark cells have the largest values. Choose one with the pointer, or with arrow keys and Enter, to see that head.",
    map?.controls, map?.note, S.element("div.map-and-head", {}, map?.place, head?.place), head?.charts);
};

S.headPanel = () => {
  const tables = S.byHeadAndPosition();
  if (!tables.length && !S.mapped().length) return null;
  const title = S.element("h3", { id: "head-name", "aria-live": "polite" });
  const shown = S.element("div"), lines = S.element("div"), controls = S.element("div.controls");
  const heads = S.mapped();
  const first = S.strongest() ?? heads[0] ?? S.anyHead(tables);
  if (!first) return null;

  const show = (layer, head) => {
    title.textContent = `Layer ${layer}, head ${head}`;
    S.setControls(controls, ...S.chooseHead(layer, head));
    shown.replaceChildren(S.attentionMap(layer, head, heads), S.headNumbers(layer, head));
    lines.replaceChildren(S.headLines(tables, layer, head));
  };
  const charts = S.element("details", {}, S.element("summary", {}, "Every metric of this head by position"), lines);
  S.headListeners.push(show);
  S.head = first;
  show(...first);
  return { place: S.element("div.head", {}, title, controls, shown), charts };
};

/** Choices of any head whose map is kept. The same controls may stay for another head: they change S.head. */
S.chooseHead = (layer, head) => {
  const counts = new Map(S.maps?.heads);
  if (!counts.has(layer)) return [];
  return [S.pick("Layer", [...counts.keys()], layer, (now) => S.openHead(now, Math.min(S.head[1], counts.get(now) - 1))),
    S.pick("Head", d3.range(counts.get(layer)), head, (now) => S.openHead(S.head[0], now))];
};

/** The head with the most window mass at position 0. */
S.strongest = () => {
  const table = S.table("attention");
  if (!table) return null;
  const rows = table.where({ position: 0 });
  const mapped = new Set(S.mapped().map((pair) => pair.join(" ")));
  const pair = (row) => [table.get("layer")[row], table.get("head")[row]];
  const candidates = mapped.size ? rows.filter((row) => mapped.has(pair(row).join(" "))) : rows;
  const best = d3.greatest(candidates.length ? candidates : rows, (row) => table.get("window_mass")[row]);
  return best === undefined ? null : pair(best);
};

S.anyHead = ([table]) => {
  const row = d3.range(table.length).find((at) => table.get("head")[at] >= 0);
  return row === undefined ? null : [table.get("layer")[row], table.get("head")[row]];
};

S.MOST_STEPS = 8; // of a training, so that their lines can be distinguished

/** The rows of the runs or arms that are side by side, or all rows if the table has none of them; of a few steps. */
S.ofShownArms = (table, rows) => {
  const labels = S.armLabels(table);
  const own = rows.filter((row) => S.shownArms?.includes(labels[row]));
  const left = own.length ? own : rows;
  if (!table.varies("step")) return left;
  const steps = table.distinct("step", left), every = Math.ceil(steps.length / S.MOST_STEPS);
  const kept = new Set(steps.filter((step, at) => (steps.length - 1 - at) % every === 0)); // the last one among them
  return left.filter((row) => kept.has(table.get("step")[row]));
};

/** All numbers of a head, from every table with rows by head. */
S.headNumbers = (layer, head) => {
  const rows = [];
  for (const table of S.tables.values()) {
    if (!table.length || !table.has("layer", "head") || table.has("token") || table.has("sequence") || table.has("group"))
      continue;
    const at = table.has("position") ? { position: 0 } : {};
    const labels = S.runLabels(table);
    for (const row of S.ofShownArms(table, table.where(at, S.rowsOfHead(table, layer, head))))
      for (const column of table.values) {
        const about = S.aboutColumn(column);
        const keys = ["pathway", "parameter"].filter((name) => table.has(name)).map((name) => table.get(name)[row]);
        rows.push([[S.withUnit(about), ...keys, S.ofKvHead(table, row), labels[row]].filter(Boolean).join(", "),
          about.text(Number(table.get(column.name)[row] ?? NaN)), about.meaning]);
      }
  }
  const details = S.element("details", {}, S.element("summary", {}, `All numbers at position 0 (${rows.length})`));
  details.append(S.plainTable([{ label: "Number" }, { label: "Value", number: true }, { label: "Meaning" }], rows,
    `Layer ${layer}, head ${head}, position 0`));
  return details;
};

S.attentionMap = (layer, head, heads) => {
  const rows = S.mapRows(layer, head), weight = S.weights(layer, head);
  const about = `Attention of layer ${layer}, head ${head}`;
  const buttons = S.element("div.controls", {}, S.element("span", {}, S.maps ? "Heads of the figure: " : "Heads with a stored map: "),
    ...heads.map((pair) => S.element("button", { type: "button", "aria-pressed": String(pair[0] === layer && pair[1] === head),
      onclick: () => S.openHead(...pair) }, `layer ${pair[0]}, head ${pair[1]}`)));
  const words = weight ? S.fromToken(weight, S.tokens().get(0) ?? new Map()) : "";
  if (weight && !rows.length) {
    const places = d3.range(S.maps.tokens);
    return S.element("div", {}, S.weightMaps(buttons, [S.heatmap({ rows: places, columns: places, rowName: "query", columnName: "key",
      text: S.number, ...S.ofTokens(S.tokens().get(0) ?? new Map()), value: weight, title: `${about}, sequence 0` })]), words, S.rounding());
  }
  if (!rows.length)
    return S.layerMaps(layer) ?? S.element("div", {}, S.element("p.note", {}, heads.length
      ? "No map of this head is stored: a run keeps the maps of a few heads. Its means over all sequences follow."
      : "This run keeps no attention maps."), heads.length ? buttons : "");
  const table = S.table("attention_maps"), labels = S.runLabels(table);
  const [key, token, sequence] = ["key", "token", "sequence"].map((name) => table.get(name));
  const maps = S.weightMaps(buttons, d3.groups(rows, (row) => `${labels[row]} ${sequence[row]}`).slice(0, S.MOST_ARMS).map(([, own]) => {
    const label = labels[own[0]];
    return S.mapOf(table, own, "query", "key", "weight", { ...S.ofTokens(new Map(own.map((row) => [key[row], token[row]]))),
      title: [`${about}, sequence ${sequence[own[0]]}`, label].filter(Boolean).join(", "),
      caption: label && `${S.visible(label)}, sequence ${sequence[own[0]]}` });
  }), S.leftOut(table));
  return S.element("div", {}, maps, words);
};

S.query = null; // position of the token whose attention the text shows

/** The sequence as text: the tokens are shaded by the attention that a chosen one gives them. */
S.fromToken = (weight, tokens) => {
  const places = d3.range(S.maps.tokens), note = S.element("p.note", { "aria-live": "polite" });
  S.query ??= places.length - 1;
  const words = places.map((key) => {
    const word = S.element("button.token", { type: "button", "aria-label": `token ${key}, ${S.visible(tokens.get(key))}`,
      onclick: () => choose(key) }, S.visible(tokens.get(key)));
    S.withTip(word, () => `${S.number(weight(S.query, key) ?? NaN)} from token ${S.query} to token ${key}`);
    return word;
  });
  const choose = (query) => {
    S.query = query;
    note.textContent = `Attention that token ${query}, ${S.visible(tokens.get(query))}, gives to each token; choose another one:`;
    words.forEach((word, key) => {
      const color = weight(query, key) ? S.weightScale(weight(query, key)) : null;
      word.setAttribute("aria-pressed", String(key === query));
      word.style.cssText = color === null ? "" : `background:${d3.rgb(color).formatHex()};color:${S.inkOn(color)}`;
    });
  };
  choose(S.query);
  return S.element("div", {}, note, S.element("div.text", {}, ...words));
};

S.weightScale = d3.scaleSequentialLog([S.FAINTEST, 1], S.ramp).clamp(true);

S.FEW_TOKENS = 24; // of a text whose tokens are written beside its map

/** What maps over tokens have in common; tokens: position → text. */
S.ofTokens = (tokens) => {
  const text = (at) => S.visible(tokens.get(at));
  return { scale: S.weightScale, more: (row, column) => ` (${text(row)} → ${text(column)})`,
    ...(tokens.size <= S.FEW_TOKENS ? { maxCell: 18, left: 110, label: (row) => `${S.shorten(text(row).trim(), 12)} ${row}` } : { maxCell: 9 }) };
};

/** How the weights of all heads are rounded on the page. */
S.rounding = () => {
  const { faintest, steps, tokens } = S.maps, percent = S.locale.format(".1%")(faintest ** (-0.5 / steps) - 1);
  return S.element("p.note", {}, `Weights of this head are rounded on this page, by at most ${percent} of their value; less than ${faintest} is 0. ` +
    `The map has the sequence's first ${tokens} tokens. In Python, run.attention(layer, head) has all of them and more digits.`);
};

/** Maps of attention weights with their legend. */
S.weightMaps = (first, maps, note = null) =>
  S.element("div", {}, first,
    S.colorLegend(S.weightScale, { label: "attention weight (lightest: 0.001 and less)", unit: "", text: S.number }),
    S.element("p.note", {}, "Gray: keys that the query does not see."), S.element("div.maps", {}, ...maps), note);

/** Maps of the layer, means over heads and sequences, for the arms that are side by side; null if the run has none. */
S.layerMaps = (layer) => {
  const table = S.table("arm_maps");
  const rows = table ? S.ofShownArms(table, table.where({ layer })) : [];
  if (!rows.length) return null;
  const about = `Attention of layer ${layer}, mean over heads and sequences`, labels = S.armLabels(table);
  return S.weightMaps(S.element("p.about", {}, about), d3.groups(rows, (row) => labels[row]).slice(0, S.MOST_ARMS).map(([label, own]) =>
    S.mapOf(table, own, "query", "key", "weight", { scale: S.weightScale, maxCell: 7, title: [about, label].filter(Boolean).join(", "),
      caption: label && S.visible(label) })), S.leftOut(table));
};

/** A chart of every column by position; for gradients one per pathway. */
S.headLines = (tables, layer, head) => {
  const charts = [];
  for (const table of tables) {
    const rows = S.ofShownArms(table, S.rowsOfHead(table, layer, head));
    const pathway = table.has("pathway") ? table.get("pathway") : null;
    for (const [of, own] of d3.groups(rows, (row) => pathway?.[row].replace("_measured", "")))
      for (const column of table.values.filter(({ kind }) => kind === "number"))
        charts.push(S.headLine(table, column, own, of));
  }
  return S.element("div", {}, S.element("div.grid", {}, ...charts.filter(Boolean)),
    ...tables.map((table) => S.leftOut(table)).filter(Boolean));
};

/** A chart of one column by position. */
S.headLine = (table, column, rows, of) => {
  const about = S.aboutColumn(column), labels = S.runLabels(table);
  const pathway = of && new Set(rows.map((row) => table.get("pathway")[row])).size > 1 ? table.get("pathway") : null;
  const points = rows.map((row) => ({ x: table.get("position")[row], y: table.get(column.name)[row],
    group: [pathway?.[row], labels[row]].filter(Boolean).join(", ") }));
  if (!points.some(({ y }) => Number.isFinite(y))) return null;
  const whose = [of?.replaceAll("_", " "), S.ofKvHead(table, rows[0])].filter(Boolean).join(" of ");
  const isOfArms = points.every(({ group }) => S.shownArms?.includes(group)); // perhaps not of all arms
  return S.lines({ points, x: { label: "position" }, y: about, height: 190, order: isOfArms ? S.shownArms : null,
    distinguishedBy: pathway && table.byName.get("pathway"), title: `${about.label}${whose && ` (${whose})`}: ${about.meaning}` });
};
