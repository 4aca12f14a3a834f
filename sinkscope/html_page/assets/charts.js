"use strict";
// Charts of lines and dots by Observable Plot, each with its numbers as a table.

// similar to Okabe and Ito's, which color-blind readers can distinguish; dashes and symbols differ in grayscale
S.COLORS = [1, 2, 3, 4, 5, 6, 7, 8].map((number) => `var(--series-${number})`);
S.DASHES = ["", "6 3", "2 2", "8 3 2 3", "4 1", "1 3", "10 4", "3 3"];
S.SYMBOLS = ["circle", "triangle", "square", "diamond", "star", "cross", "wye", "times"];

S.width = (node, most = 1100) => Math.max(240, Math.min(most, node.clientWidth || 340));

S.waiting = new Set(); // functions that begin to draw a chart
window.addEventListener("beforeprint", () => S.waiting.forEach((begin) => begin()));

/**
 * An element for a chart, which is drawn when it is near the window, and again when its width changes. Before that it
 * takes up `height`, so that nothing moves.
 */
S.drawn = (draw, { height, kind = "chart" }) => {
  const place = S.element(`div.${kind}`);
  place.style.minHeight = `${height}px`;
  let before = 0;
  const resized = new ResizeObserver(() => {
    const width = Math.round(place.clientWidth);
    if (!width || width === before) return;
    before = width;
    place.replaceChildren(draw(S.width(place)));
    place.style.minHeight = "";
  });
  const begin = () => {
    near.disconnect();
    S.waiting.delete(begin);
    resized.observe(place);
  };
  const near = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && begin(),
    { rootMargin: "800px" });
  near.observe(place);
  S.waiting.add(begin);
  return place;
};

S.isLog = (values) => {
  const positive = values.filter((value) => Number.isFinite(value));
  return positive.length > 0 && positive.every((value) => value > 0) && d3.max(positive) / d3.median(positive) > 100;
};

/** At most seven powers of ten around the values: Plot's own ticks of a few decades merge into a gray bar. */
S.decades = (values) => {
  const [low, high] = d3.extent(values).map(Math.log10);
  const all = d3.range(Math.floor(low), Math.ceil(high) + 1);
  const every = Math.ceil(all.length / 7);
  return all.filter((power, at) => at % every === 0).map((power) => 10 ** power);
};

/** A chart of Plot as one image with a name: its parts have no role, and its numbers are in a table. */
S.plot = (options) => {
  const svg = Plot.plot({ ...options, style: { background: "transparent", fontSize: "12px" } });
  svg.setAttribute("role", "img");
  for (const part of svg.querySelectorAll("[aria-label], [aria-description]")) {
    part.removeAttribute("aria-label");
    part.removeAttribute("aria-description");
  }
  return svg;
};

/**
 * Lines of values: one for each group.
 * points: [{x, y, group, line, low, high}]; a group may have several lines, and low and high are the ends of a stroke;
 * x: {label, all}, where the axis also includes the values `all`; y: {label, unit, text}; rule: an x to mark;
 * ordinal: x is not a number; distinguishedBy: the column of the groups, whose meaning is below the chart;
 * order: all groups of related charts, which have the same colors in each of them.
 */
S.lines = ({ points, x, y, title, rule = null, log = null, dots = false, height = 260, ordinal = false, distinguishedBy = null, order = null }) => {
  const groups = [...new Set(points.map(({ group }) => group))], places = new Map((order ?? groups).map((group, at) => [group, at]));
  const finite = points.filter(({ y: value }) => Number.isFinite(value));
  const isLog = log ?? S.isLog(finite.map(({ y: value }) => value));
  const shown = finite.filter(({ y: value }) => value > 0 || !isLog); // a logarithmic axis has no 0
  const text = y.text;
  const draw = (width) => {
    if (!shown.length) return S.element("p.note", {}, "No values.");
    const look = (list) => (group) => list[places.get(group) % list.length];
    const styles = { x: "x", y: "y" };
    const series = d3.groups(shown, ({ group, line }) => `${group} ${line ?? ""}`).map(([, own]) => [own[0].group, own]);
    const names = ordinal ? [...new Set(shown.map((point) => String(point.x)))] : [];
    const isTight = names.length * (d3.max(names, ({ length }) => length) ?? 0) * 6.5 > width - 60; // labels would overlap
    const short = (name) => (isTight ? S.shorten(String(name), 18) : name);
    return S.plot({
      width, height: height + (isTight ? 74 : 12), marginLeft: isTight ? 80 : 56, marginTop: 28, marginBottom: isTight ? 104 : 42, ariaLabel: plain,
      x: { label: S.withUnit(x), labelOffset: isTight ? 96 : 34, tickRotate: isTight ? -35 : 0, type: ordinal ? "point" : undefined, domain: x.all ? [first, last] : undefined, grid: false, inset: 5,
        tickFormat: ordinal ? short : (value) => S.number(value), ticks: Math.min(10, Math.floor(width / 60), steps) },
      y: { label: S.withUnit(y), type: isLog ? "log" : "linear", grid: true, nice: true, zero: !isLog && S.isShare(y), domain: shown.every(({ y: value }) => value === 0) ? [0, 1] : undefined,
        ticks: isLog ? S.decades(shown.map(({ y: value }) => value)) : Math.max(3, Math.round(height / 50)), tickFormat: S.tick(y) },
      marks: [
        !isLog && d3.min(shown, ({ y: value }) => value) <= 0 ? Plot.ruleY([0], { strokeOpacity: 0.4 }) : null,
        rule === null ? null : Plot.ruleX([rule], { strokeDasharray: "4 3" }),
        ...series.map(([group, own]) =>
          dots ? null : Plot.line(own, { ...styles, stroke: look(S.COLORS)(group), strokeDasharray: look(S.DASHES)(group), strokeWidth: 1.8 })),
        ...series.map(([group, own]) => {
          const known = own.filter(({ low, high }) => Number.isFinite(low) && Number.isFinite(high) && (low > 0 || !isLog));
          return known.length ? Plot.ruleX(known, { x: "x", y1: "low", y2: "high", stroke: look(S.COLORS)(group), strokeWidth: 1.2 }) : null;
        }),
        ...series.map(([group, own]) =>
          own.length > 80 && !dots ? null : Plot.dot(own, {
            ...styles, symbol: look(S.SYMBOLS)(group), r: 2.6, fill: look(S.COLORS)(group), stroke: look(S.COLORS)(group), strokeWidth: 1,
          })),
        Plot.tip(shown, Plot.pointer({
          x: "x", y: "y",
          title: (point) => `${[point.group, point.line].filter(Boolean).map((one) => `${one}\n`).join("")}${x.label} ${S.value(point.x)}: ${text(point.y)}`,
          fill: "var(--panel)", stroke: "var(--line)",
        })),
      ],
    });
  };
  const [first, last] = d3.extent([...shown.map((point) => point.x), ...(x.all ?? [])]);
  const steps = shown.every((point) => Number.isInteger(point.x)) ? Math.max(1, last - first) : Infinity; // no ticks between layers
  const plain = title.replaceAll("`", "");
  const legend = groups.length > 1 ? S.legend(groups, dots, places) : null;
  const table = () => S.plainTable(
    [{ label: S.withUnit(x) }, ...groups.map((group) => ({ label: group || S.withUnit(y), number: true }))],
    d3.groups(finite, (point) => point.x).map(([at, own]) => [
      S.value(at),
      ...groups.map((group) => own.filter((point) => point.group === group).map((point) => text(point.y)).join(" / ") || "–"),
    ]), plain);
  return S.element("figure", { role: "group", "aria-label": plain },
    S.element("figcaption", {}, ...S.sentence(title)), legend, S.drawn(draw, { height: height + 12 }),
    legend && distinguishedBy?.about ? S.element("p.note", {}, ...S.sentence(`${distinguishedBy.name}: ${distinguishedBy.about}`)) : null, S.numbers(table));
};

/**
 * Dots by name. points: [{name, value}]; marks(finite points, channels): Plot's marks; tip(point): its text;
 * caption: further text of the title; rowHeight: pixels of a name.
 */
S.dotsByName = ({ points, names, about, title, caption, marks, tip, rowHeight }) => {
  const shown = points.filter(({ value }) => Number.isFinite(value));
  const isLog = S.isLog(shown.map(({ value }) => value));
  const at = { x: "value", y: "name" }, height = 64 + names.length * rowHeight;
  const draw = (width) => {
    const narrow = width < 560;
    const characters = Math.min(d3.max(names, ({ length }) => length) ?? 0, narrow ? 20 : 44);
    return S.plot({
      width, height, marginLeft: 24 + 7.5 * characters, marginTop: 10, marginBottom: 44, ariaLabel: title,
      x: { label: S.withUnit(about), labelOffset: 36, grid: true, type: isLog ? "log" : "linear", zero: !isLog && S.isShare(about),
        tickFormat: S.tick(about), ticks: narrow ? 3 : 6 },
      y: { domain: names, label: null, tickFormat: (name) => S.shorten(name, characters) },
      marks: [...marks(shown, at), Plot.tip(shown, Plot.pointer({ ...at, fill: "var(--panel)", stroke: "var(--line)", title: tip }))],
    });
  };
  return S.element("figure", { role: "group", "aria-label": title },
    S.element("figcaption", {}, ...S.sentence(title), caption), S.drawn(draw, { height }));
};

/** The meaning of each color, dash and symbol; dots have no dash. */
S.legend = (groups, dots, places) =>
  S.element("ul.legend", {}, ...groups.map((group) => {
    const at = places.get(group), color = S.COLORS[at % S.COLORS.length];
    const line = d3.create("svg").attr("width", 34).attr("height", 12).attr("aria-hidden", "true");
    if (!dots) line.append("line").attr("x1", 0).attr("x2", 34).attr("y1", 6).attr("y2", 6).style("stroke", color)
      .attr("stroke-width", 2).attr("stroke-dasharray", S.DASHES[at % S.DASHES.length]);
    const kinds = { circle: d3.symbolCircle, triangle: d3.symbolTriangle, square: d3.symbolSquare,
      diamond: d3.symbolDiamond, star: d3.symbolStar, cross: d3.symbolCross, wye: d3.symbolWye, times: d3.symbolTimes };
    line.append("path").attr("transform", "translate(17,6)").style("fill", color).style("stroke", color)
      .attr("d", d3.symbol(kinds[S.SYMBOLS[at % S.SYMBOLS.length]], 28)());
    return S.element("li", {}, line.node(), S.visible(group));
  }));
