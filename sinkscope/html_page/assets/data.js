"use strict";
// The run's data: tables by column, as compact.py writes them.

const S = {};

S.decoded = (values) => {
  if (Array.isArray(values)) return values.map((v) => (v === "inf" ? Infinity : v === "-inf" ? -Infinity : v));
  if (values.of) return S.decoded(values.at).map((at) => (at < 0 ? null : values.of[at]));
  const all = [];
  for (let at = 0; at < values.runs.length; at += 2)
    for (let count = values.runs[at + 1]; count > 0; count--) all.push(values.runs[at]);
  return S.decoded(all);
};

S.Table = class {
  constructor(raw) {
    this.name = raw.name;
    this.rows = raw.rows; // of the parquet file
    this.leftOut = raw.left_out; // a sentence about the rows that are not here
    this.columns = raw.columns;
    this.byName = new Map(raw.columns.map((column) => [column.name, column]));
    this.decodedColumns = new Map();
    this.codedColumns = new Map();
  }

  get(name) {
    if (!this.decodedColumns.has(name)) this.decodedColumns.set(name, S.decoded(this.byName.get(name).values));
    return this.decodedColumns.get(name);
  }

  /** A column's values as whole numbers, one for each different value, and their count; computed once. */
  codes(name) {
    if (!this.codedColumns.has(name)) {
      const found = new Map();
      const codes = Int32Array.from(this.get(name), (value) => {
        if (!found.has(value)) found.set(value, found.size);
        return found.get(value);
      });
      this.codedColumns.set(name, { codes, count: found.size });
    }
    return this.codedColumns.get(name);
  }

  /** Add a text column that the parquet file does not have. */
  derive(name, about, values) {
    this.byName.set(name, { name, about, unit: "", kind: "text", values, isDerived: true });
  }

  get length() {
    return this.get(this.columns[0].name).length;
  }

  /** All row numbers, and those of single layers. */
  get all() {
    return d3.range(this.length);
  }

  get ofLayers() {
    const layer = this.get("layer");
    return this.all.filter((row) => layer[row] >= 0);
  }

  has(...names) {
    return names.every((name) => this.byName.has(name));
  }

  /** Row numbers in which each named column has the given value. */
  where(wanted, rows = null) {
    const checks = Object.entries(wanted).map(([name, value]) => [this.get(name), value]);
    return (rows ?? this.all).filter((row) => checks.every(([values, value]) => values[row] === value));
  }

  /** The different values of a column: texts in their order, numbers sorted. */
  distinct(name, rows = null) {
    const values = this.get(name);
    const found = new Set(rows === null ? values : rows.map((row) => values[row]));
    found.delete(null);
    const listed = [...found];
    return listed.every((value) => typeof value === "number") ? listed.sort(d3.ascending) : listed;
  }

  varies(name) {
    return this.has(name) && this.distinct(name).length > 1;
  }

  /** A row as an object. */
  row(at) {
    return Object.fromEntries(this.columns.map(({ name }) => [name, this.get(name)[at]]));
  }

  /** Columns that identify a row, and columns with measured values. */
  get keys() {
    return [...this.byName.values()].filter(({ name, kind }) => kind === "text" || kind === "whole" || S.NUMBERED.has(name));
  }

  get values() {
    return this.columns.filter(({ name, kind }) => (kind === "number" || kind === "truth") && !S.NUMBERED.has(name));
  }
};

// columns of numbers that identify a row
S.NUMBERED = new Set(["seed", "epsilon"]);
// columns that distinguish runs or arms
S.ARMS = ["run", "level", "model", "condition"];

S.ON_LOAD = []; // functions that add columns to tables of one command, which its script adds

S.load = (text) => {
  S.data = JSON.parse(text);
  S.tables = new Map(S.data.tables.map((raw) => [raw.name, new S.Table(raw)]));
  S.manifest = S.data.manifest;
  for (const prepare of S.ON_LOAD) prepare();
};

/** Inflate the weights of all heads, `maps` as compact.py writes it; null if there are none. */
S.unpacked = async (maps) => {
  if (!maps || !window.DecompressionStream) return null;
  const deflated = Uint8Array.from(atob(maps.codes), (character) => character.charCodeAt(0));
  const inflated = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  const size = maps.causal ? (maps.tokens * (maps.tokens + 1)) / 2 : maps.tokens ** 2, first = new Map(); // layer → first byte
  let bytes = 0;
  for (const [layer, heads] of maps.heads) {
    first.set(layer, bytes);
    bytes += heads * size;
  }
  return { ...maps, codes: new Uint8Array(await new Response(inflated).arrayBuffer()), size, first };
};

/** The weights of a head: (query, key) → weight, or null where the query does not see the key; null if it is not kept. */
S.weights = (layer, head) => {
  const { heads, tokens, causal, faintest, steps, codes, size, first } = S.maps ?? { heads: [] };
  if (!heads.some(([of, count]) => of === layer && head < count)) return null;
  const start = first.get(layer) + head * size;
  return (query, key) => {
    if (causal && key > query) return null;
    const code = codes[start + (causal ? (query * (query + 1)) / 2 : query * tokens) + key];
    return code && faintest ** (1 - (code - 1) / steps);
  };
};

/** A table of this name that has rows, or null. */
S.table = (name) => {
  const table = S.tables.get(name);
  return table && table.length ? table : null;
};

// --- labels and formats

/** Label, unit, meaning and format of a metric. */
S.aboutMetric = (name) => {
  const metric = S.data.metrics[name];
  return metric
    ? { label: metric.short, unit: metric.unit, meaning: metric.definition + (metric.source ? ` (${metric.source})` : ""),
        text: S.formatter(metric.form) }
    : { label: name.replaceAll("_", " "), unit: "", meaning: "", text: S.number };
};

/** The same for a column: a metric of the same name has its format and unit, but its definition may differ. */
S.aboutColumn = ({ name, about, unit }) => {
  const metric = S.aboutMetric(name);
  return { label: name.replaceAll("_", " "), unit: unit || metric.unit, meaning: about, text: metric.text };
};

/** Whether values are shares, whose axis begins at 0. */
S.isShare = (about) => about.unit === "share" || about.text(0.5).endsWith("%");

/** The format of numbers at an axis. */
S.tick = (about) => (about.text(0.5).endsWith("%") ? (value) => S.locale.format(".0~%")(value) : S.number);

S.locale = d3.formatLocale({ decimal: ".", thousands: ",", grouping: [3], currency: ["", ""], minus: "−" });
S.plainNumber = S.locale.format(",.4~g");

/** A number with four digits. */
S.number = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size < 1e6 && (Number.isInteger(value) || size >= 1e4)) return S.locale.format(",.0f")(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? S.locale.format(".3~e")(value) : S.plainNumber(value);
};

/** A format of metrics.py, such as `{:.1%}`, which d3 writes the same way, always without the sign of 0 (Python's z). */
S.formatter = (form) => {
  const format = S.locale.format(form.slice(2, -1).replace("z", "") || ".4~g");
  return (value) =>
    value === null || value === undefined || !Number.isFinite(value) || Math.abs(value) >= 1e6
      ? S.number(value)
      : format(value);
};

S.value = (value) => (typeof value === "number" ? S.number(value) : value === null ? "–" : String(value));

/** Text with visible signs for invisible characters: a token may be a line break. */
S.visible = (text) => {
  const shown = String(text ?? "").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍");
  return shown === "" ? "∅" : shown.replace(/[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "�");
};

/** A name of at most `most` characters, without its middle: names mostly differ at the ends. */
S.shorten = (name, most) => {
  if (name.length <= most) return name;
  const last = Math.floor((most - 1) * 0.6);
  return `${name.slice(0, most - 1 - last)}…${name.slice(name.length - last)}`;
};

S.withUnit = ({ label, unit }) => (unit && unit !== "share" ? `${label} (${unit})` : label);
