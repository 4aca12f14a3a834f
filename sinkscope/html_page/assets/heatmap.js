"use strict";
// Maps of colored cells: layer × head, layer × position, query × key; also for the keyboard.

// monotone in lightness, also for color-blind readers; dark is high, as in the PNGs
S.ramp = (share) => d3.interpolateMagma(1 - share);

/** A color scale over values: from 0 if none is negative, logarithmic if a few are much larger than the rest. */
S.colorScale = (values, ramp = S.ramp) => {
  const finite = values.filter((value) => Number.isFinite(value));
  const [least, most] = finite.length ? d3.extent(finite) : [0, 1];
  if (S.isLog(finite)) return d3.scaleSequentialLog([least, most], ramp);
  const from = Math.min(0, least);
  return d3.scaleSequential([from, most > from ? most : from + 1], ramp);
};

/** Black or white, whichever is more legible on a color. */
S.inkOn = (color) => {
  const { r, g, b } = d3.rgb(color);
  const linear = (part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  return luminance > 0.1791 ? "#000" : "#fff";
};

/** The scale as a strip with its values. */
S.colorLegend = (scale, about) => {
  const [width, steps] = [220, 44];
  const [least, most] = scale.domain();
  const isLog = Boolean(scale.base);
  const at = (share) => (isLog ? least * (most / least) ** share : least + share * (most - least));
  const name = `Color scale of ${about.label}: from ${about.text(least)} to ${about.text(most)}${isLog ? ", by decades" : ""}`;
  const svg = d3.create("svg").attr("width", width + 60).attr("height", 30).attr("role", "img").attr("aria-label", name);
  svg.selectAll("rect").data(d3.range(steps)).join("rect").attr("x", (step) => 30 + (step * width) / steps)
    .attr("width", width / steps + 0.5).attr("height", 10).attr("fill", (step) => scale(at((step + 0.5) / steps)));
  const decades = isLog ? S.decades([least, most]).filter((value) => value >= least && value <= most) : [];
  const marked = decades.length > 1 ? decades.map((value) => Math.log(value / least) / Math.log(most / least)) : [0, 0.5, 1];
  const label = (share) => (decades.length > 1 ? S.number(10 ** Math.round(Math.log10(at(share)))) : about.text(at(share)));
  svg.selectAll("text").data(marked).join("text").attr("x", (share) => 30 + share * width).attr("y", 24)
    .attr("text-anchor", "middle").attr("class", "tick").text(label);
  return S.element("div.colors", {}, S.element("span", {}, S.withUnit(about) + (isLog ? ", by decades" : "")), svg.node());
};

/**
 * A map, as a figure.
 * rows, columns: labels; rowName, columnName: their names; value(row, column): number or null; scale: of colors;
 * text: number → text; more(row, column): further text; title; caption: a shorter title; maxCell: pixels;
 * label(row): its tick, in a margin of `left` pixels;
 * pick(row, column): called by Enter and a click; chosen: [row, column]; hover(row, column): called by the pointer.
 */
S.heatmap = (given) => {
  const map = new S.Heatmap(given);
  const figure = S.element("figure.map", { role: "group", "aria-label": given.title },
    S.element("figcaption", {}, given.caption || given.title), S.drawn((width) => map.draw(width), { height: map.height(340), kind: "scroll-map" }),
    S.numbers(() => map.table()));
  figure.style.width = `${Math.max(190, map.left + 4 + given.columns.length * map.maxCell)}px`;
  figure.map = map;
  return figure;
};

/** A map of rows of a table, by two of its columns. `given`: as for S.heatmap. */
S.mapOf = (table, rows, down, across, column, given) => {
  const [y, x, values] = [down, across, column].map((name) => table.get(name));
  const found = new Map(rows.map((row) => [`${y[row]} ${x[row]}`, values[row]]));
  return S.heatmap({ rows: table.distinct(down, rows), columns: table.distinct(across, rows), rowName: down, columnName: across,
    text: S.number, value: (row, column) => found.get(`${row} ${column}`) ?? null, ...given });
};

S.ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

S.Heatmap = class {
  constructor(given) {
    Object.assign(this, { pick: null, hover: () => {}, more: () => "", chosen: null, maxCell: 26, left: 34, label: (row) => row }, given);
    this.places = new Map(); // cell → [row, column]
    this.cells = new Map(); // "row column" → cell
  }

  name(row, column) {
    return `${this.rowName} ${row}, ${this.columnName} ${column}: ${this.text(this.value(row, column))}${this.more(row, column)}`;
  }

  sizes(width) {
    const across = Math.max(3, Math.min(this.maxCell, (width - this.left - 4) / this.columns.length));
    return [across, Math.max(3, Math.min(across, this.rows.length > 40 ? 10 : 16))];
  }

  height(width) {
    return 18 + this.rows.length * this.sizes(width)[1] + 26;
  }

  draw(width) {
    const [across, down] = this.sizes(width);
    const [left, top, height] = [this.left, 18, this.height(width)];
    const svg = d3.create("svg").attr("width", left + this.columns.length * across + 4).attr("height", height)
      .attr("class", "heatmap").attr("role", "grid")
      .attr("aria-label", `${this.title}. Arrow keys move${this.pick ? ", Enter opens" : ""}.`);
    this.ticks(svg.append("g").attr("aria-hidden", "true"), left, top, across, down);
    this.places.clear();
    this.cells.clear();
    // no value, no cell: half of a causal map is empty
    svg.append("rect").attr("x", left).attr("y", top).attr("width", this.columns.length * across)
      .attr("height", this.rows.length * down).attr("fill", "var(--nothing)").attr("stroke", "var(--control-line)").attr("aria-hidden", "true");
    this.rows.forEach((row, y) => {
      const line = svg.append("g").attr("role", "row").node();
      this.columns.forEach((column, x) => this.value(row, column) !== null && line.append(
        this.cell(row, column, left + x * across, top + y * down, across - (across > 6 ? 1 : 0), down - (down > 6 ? 1 : 0))));
      if (!line.childElementCount) line.remove();
    });
    this.enter = this.cells.get((this.chosen ?? [this.rows[0], this.columns[0]]).join(" ")) ?? this.cells.values().next().value;
    this.enter?.setAttribute("tabindex", 0);
    this.mark(this.chosen);
    this.listen(svg.node());
    return svg.node();
  }

  ticks(group, left, top, across, down) {
    const text = (x, y, anchor, label) =>
      group.append("text").attr("class", "tick").attr("x", x).attr("y", y).attr("text-anchor", anchor).text(label);
    const bottom = top + this.rows.length * down;
    const everyRow = Math.ceil(13 / down), everyColumn = Math.ceil(22 / across);
    text(0, 11, "start", `${this.rowName} ↓`);
    text(left, bottom + 24, "start", `${this.columnName} →`);
    this.rows.forEach((row, at) => at % everyRow || text(left - 5, top + (at + 0.5) * down + 4, "end", this.label(row)));
    this.columns.forEach((column, at) => at % everyColumn || text(left + (at + 0.5) * across, bottom + 11, "middle", column));
  }

  cell(row, column, x, y, width, height) {
    const value = this.value(row, column);
    const cell = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const attributes = { x, y, width, height, role: "gridcell", tabindex: -1, "data-row": row, "data-column": column,
      fill: Number.isFinite(value) ? this.scale(value) : "var(--nothing)", "aria-label": this.name(row, column) };
    for (const [name, text] of Object.entries(attributes)) cell.setAttribute(name, text);
    this.places.set(cell, [row, column]);
    this.cells.set(`${row} ${column}`, cell);
    return cell;
  }

  listen(svg) {
    const at = (act) => (event) => this.places.has(event.target) && act(event.target, event, ...this.places.get(event.target));
    const leave = () => { S.hideTip(); this.hover(null, null); };
    svg.addEventListener("pointermove", at((cell, event, row, column) => {
      S.showTip(this.name(row, column), event);
      this.hover(row, column);
    }));
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("focusout", leave);
    svg.addEventListener("focusin", at((cell, event, row, column) => {
      const { right, bottom } = cell.getBoundingClientRect();
      S.showTip(this.name(row, column), { clientX: right, clientY: bottom });
      this.hover(row, column);
    }));
    svg.addEventListener("click", at((cell, event, row, column) => this.choose(row, column)));
    svg.addEventListener("keydown", at((cell, event, row, column) => {
      const [down, right] = S.ARROWS[event.key] ?? [0, 0];
      if (event.key !== "Enter" && event.key !== " " && !down && !right) return;
      event.preventDefault();
      if (!down && !right) return this.choose(row, column);
      this.moveFrom(this.rows.indexOf(row), this.columns.indexOf(column), down, right);
    }));
  }

  /** Move the focus to the next cell in a direction, if there is one. */
  moveFrom(y, x, down, right) {
    do { y += down; x += right; } while (y in this.rows && x in this.columns && !this.cells.has(`${this.rows[y]} ${this.columns[x]}`));
    const next = this.cells.get(`${this.rows[y]} ${this.columns[x]}`);
    if (!next) return;
    this.enter.setAttribute("tabindex", -1);
    this.enter = next;
    this.enter.setAttribute("tabindex", 0);
    this.enter.focus();
  }

  choose(row, column) {
    if (this.pick) this.pick(row, column);
  }

  /** Mark the cell whose head is shown next to the map. */
  mark(place) {
    const set = (at, isChosen) => {
      const cell = at && this.cells.get(at.join(" "));
      cell?.classList.toggle("chosen", isChosen);
      if (isChosen) cell?.setAttribute("aria-selected", "true");
      else cell?.removeAttribute("aria-selected");
    };
    set(this.chosen, false);
    this.chosen = place;
    set(place, true);
  }

  /** Outline a cell while the pointer is on the same cell of another map. */
  outline(row, column) {
    this.outlined?.classList.remove("linked");
    this.outlined = row === null ? null : this.cells.get(`${row} ${column}`);
    this.outlined?.classList.add("linked");
  }

  table() {
    return S.plainTable(
      [{ label: `${this.rowName} \\ ${this.columnName}` }, ...this.columns.map((column) => ({ label: String(column), number: true }))],
      this.rows.map((row) => [String(row), ...this.columns.map((column) => this.text(this.value(row, column)))]), this.title);
  }
};
