"use strict";
// A sequence as text, with tokens shaded by the attention that they receive.

/** Token texts by sequence and position, from all tables with tokens. */
S.tokens = () => {
  const found = new Map();
  for (const table of S.tables.values()) {
    if (!table.length || !table.has("token", "sequence") || S.isOfSeveral(table)) continue;
    const name = ["position", "key"].find((name) => table.has(name));
    if (!name) continue;
    const [sequence, position, token] = [table.get("sequence"), table.get(name), table.get("token")];
    for (let row = 0; row < sequence.length; row++) {
      if (!found.has(sequence[row])) found.set(sequence[row], new Map());
      found.get(sequence[row]).set(position[row], token[row]);
    }
  }
  return found;
};

/** Numbers by which tokens are shaded: {name, covers(sequence), of(sequence) → {position → number}, text, about}. */
S.shadings = () => {
  const ways = [];
  const sinks = S.table("sink_positions");
  if (sinks && !S.isOfSeveral(sinks)) {
    const [sequence, position] = [sinks.get("sequence"), sinks.get("position")];
    const bySequence = d3.rollup(d3.range(sinks.length), (rows) => rows.length, (row) => sequence[row], (row) => position[row]);
    ways.push({
      name: "heads of which the token is a sink",
      about: "Rows of the table sink_positions: the heads of all layers whose window mass at this token is above ε.",
      covers: (at) => !sinks.leftOut || bySequence.has(at),
      of: (at) => bySequence.get(at) ?? new Map(),
      text: (count) => `${S.number(count ?? 0)} heads`,
    });
  }
  const maps = S.table("attention_maps");
  if (maps && maps.has("head") && !S.isOfSeveral(maps))
    for (const [layer, head] of S.mapped()) {
      const received = d3.group(S.data.received.filter((row) => row[0] === layer && row[1] === head), (row) => row[2]);
      ways.push({
        name: `attention that it receives in layer ${layer}, head ${head}`,
        about: "Mean of the stored attention weights on this token, over the queries that see it.",
        covers: (at) => received.has(at),
        of: (at) => new Map((received.get(at) ?? []).map(([, , , key, weight]) => [key, weight])),
        text: (value) => S.number(value ?? NaN),
      });
    }
  return ways;
};

S.text = () => {
  const tokens = S.tokens(), ways = S.shadings();
  if (!tokens.size || !ways.length) return null;
  const state = { sequence: null, way: ways[0] };
  const place = S.element("div"), controls = S.element("div.controls");

  const chooseWay = (way) => {
    state.way = way;
    const sequences = [...tokens.keys()].filter(way.covers).sort(d3.ascending);
    if (!sequences.includes(state.sequence)) state.sequence = sequences[0];
    S.setControls(controls,
      S.pick("Shaded by", ways, way, chooseWay, ({ name }) => name),
      S.pick("Sequence", sequences, state.sequence, (value) => { state.sequence = value; redraw(); }));
    redraw();
  };

  const redraw = () => {
    if (state.sequence === undefined) return place.replaceChildren(S.element("p.note", {}, "No sequence has tokens here."));
    const own = tokens.get(state.sequence), values = state.way.of(state.sequence);
    const scale = S.colorScale([0, ...values.values()], (share) => d3.interpolateYlOrBr(0.08 + 0.7 * share));
    const places = [...own.keys()].sort(d3.ascending);
    const gaps = places.length <= places.at(-1);
    const all = places.flatMap((position, at) => {
      const value = values.get(position);
      const color = value ? scale(value) : null; // 0 is not shaded
      const label = () => `position ${position}, ${S.visible(own.get(position))}: ${state.way.text(value)}`;
      const style = color === null ? null : `background:${d3.rgb(color).formatHex()};color:${S.inkOn(color)}`;
      const word = S.element("span.token", { tabindex: at ? -1 : 0, role: "listitem", "aria-label": label(),
        "data-position": position, style }, S.visible(own.get(position)));
      S.withTip(word, label);
      const before = at ? places[at - 1] : -1;
      return position > before + 1 ? [S.element("span.gap", { role: "listitem", "aria-label": "tokens not stored" }, "…"), word] : [word];
    });
    const list = S.element("div.text", { role: "list", "aria-label": `Tokens of sequence ${state.sequence}` }, ...all);
    S.arrowKeys(list, ".token");
    const table = () => S.plainTable([{ label: "Position", number: true }, { label: "Token" }, { label: state.way.name, number: true }],
      places.map((position) => [S.number(position), S.visible(own.get(position)), state.way.text(values.get(position))]),
      `Sequence ${state.sequence}`);
    place.replaceChildren(S.element("p.about", {}, state.way.about),
      gaps ? S.element("p.note", {}, "Only the tokens of this sequence that are sinks are stored; the others are left out (…).") : "",
      S.colorLegend(scale, { label: state.way.name, unit: "", text: S.number }), list, S.numbers(table));
  };
  chooseWay(ways[0]);
  return S.section("text", "The text", "Tokens shaded by the attention that they receive: dark tokens receive the most. Point at one, or move with arrow keys.",
    controls, place, S.leftOut(S.tables.get("sink_positions") ?? {}) ?? "");
};

/** The arrow keys move the focus among the elements of a list. */
S.arrowKeys = (list, selector) =>
  list.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const all = [...list.querySelectorAll(selector)];
    const next = all[all.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    document.activeElement.setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
  });
