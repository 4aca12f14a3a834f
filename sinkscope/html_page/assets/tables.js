"use strict";
// Every table, which can be sorted and filtered, with the meaning of its columns.

S.PAGE_ROWS = 50; // at most, and fewer of a wide table

S.tablesSection = () => {
  const tables = [...S.tables.values()];
  if (!tables.length) return null;
  const place = S.element("div");
  const open = (table) => place.replaceChildren(S.tableView(table));
  const preferred = ["claim", "summary", "effect", S.data.first_table];
  const first = preferred.map((name) => S.table(name)).find(Boolean) ?? tables[0];
  open(first);
  return S.section("tables", "Tables", `Numbers have ${S.data.digits} significant digits here; the parquet files have all.`,
    S.element("div.controls", {}, S.pick("Table", tables, first, open, ({ name, rows }) => `${name} (${S.number(rows)} ${rows === 1 ? "row" : "rows"})`)), place);
};

S.tableView = (table) => {
  const state = { sort: null, down: false, first: 0, filter: "" };
  const most = Math.max(10, Math.min(S.PAGE_ROWS, Math.round(S.CELLS_AT_ONCE / table.columns.length)));
  const body = S.element("tbody"), head = S.element("tr"), status = S.element("p.note", { role: "status" });
  const texts = (row) => table.columns.map(({ name, kind }) => cellText(table.get(name)[row], kind, name));
  const filter = S.element("input", { id: S.newId("filter"), type: "search", placeholder: "text, or column = value",
    oninput: () => { state.filter = filter.value.trim(); state.first = 0; redraw(); } });

  // a narrow window leaves out columns with equal values in all rows, and has a sentence about them
  const alike = table.columns.filter(({ name, kind }) => kind === "text" && !table.varies(name));
  const narrow = alike.length && table.length > 1 ? S.element("p.note.narrow", {},
    `In all rows: ${alike.filter(({ name }) => table.get(name)[0]).map(({ name }) => `${S.visible(name)} ${texts(0)[table.columns.findIndex((one) => one.name === name)]}`).join(", ")}.`) : "";
  const classes = table.columns.map((column) =>
    [["number", "whole"].includes(column.kind) ? ".number" : "", narrow && alike.includes(column) ? ".alike" : ""].join(""));

  const headers = table.columns.map(({ name, about, unit }, at) => {
    const button = S.element("button.sort", { type: "button", title: [about, unit && `in ${unit}`].filter(Boolean).join(", "),
      onclick: () => { state.down = state.sort === name ? !state.down : false; state.sort = name; state.first = 0; redraw(); } }, S.visible(name));
    return S.element(`th${classes[at]}`, { scope: "col" }, button);
  });
  head.append(...headers);

  const matching = () => {
    const { all } = table;
    if (!state.filter) return all;
    const [, name, operator, wanted] = state.filter.match(/^(\w+)\s*(=|<|>)\s*(.+)$/) ?? [];
    if (name && table.has(name)) {
      const values = table.get(name), number = Number(wanted);
      const tests = { "=": (value) => String(value) === wanted || value === number, "<": (value) => value !== null && value < number,
        ">": (value) => value !== null && value > number };
      return all.filter((row) => tests[operator](values[row]));
    }
    const text = state.filter.toLowerCase();
    const inText = table.columns.filter(({ kind }) => kind === "text").map(({ name }) => table.get(name));
    return all.filter((row) => inText.some((values) => String(values[row] ?? "").toLowerCase().includes(text)));
  };

  const redraw = () => {
    let rows = matching();
    if (state.sort) {
      const values = table.get(state.sort);
      rows = d3.sort(rows, (a, b) => (values[a] === null) - (values[b] === null) ||
        (state.down ? d3.descending : d3.ascending)(values[a], values[b]));
    }
    const shown = rows.slice(state.first, state.first + most);
    headers.forEach((header, at) => {
      const sorted = table.columns[at].name === state.sort;
      if (sorted) header.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
    body.replaceChildren(...shown.map((row) => S.element("tr", {}, ...texts(row).map((text, at) =>
      S.element(`td${classes[at]}${text.length > 40 ? ".long" : ".short"}`, {}, text)))));
    const last = state.first + shown.length;
    status.textContent = `Rows ${S.number(shown.length ? state.first + 1 : 0)} to ${S.number(last)} of ${S.number(rows.length)}` +
      (rows.length < table.length ? ` that match, of ${S.number(table.length)}` : "") +
      (table.leftOut ? `. The table has ${S.number(table.rows)} rows: ${table.leftOut}.` : "");
    back.disabled = state.first === 0;
    on.disabled = last >= rows.length;
  };
  const turn = (by) => () => { state.first = Math.max(0, state.first + by); redraw(); };
  const back = S.element("button", { type: "button", onclick: turn(-most) }, "Previous rows");
  const on = S.element("button", { type: "button", onclick: turn(most) }, "Next rows");
  redraw();
  const meanings = S.element("dl.meanings", {}, ...table.columns.flatMap(({ name, about, unit }) =>
    [S.element("dt", {}, S.visible(name)), S.element("dd", {}, `${about || "–"}${unit ? ` (${unit})` : ""}`)]));
  return S.element("div", {},
    S.element("div.controls", {}, S.element("div.control", {}, S.element("label", { for: filter.id }, "Filter"), filter), back, on),
    status, narrow,
    S.element("div.scroll.rows", { tabindex: 0, role: "region", "aria-label": `Table ${table.name}` },
      S.element("table", {}, S.element("caption", {}, table.name), S.element("thead", {}, head), body)),
    S.element("details", {}, S.element("summary", {}, "Meaning of the columns"), meanings));
};

const cellText = (value, kind, name) => {
  if (value === null) return "–";
  if (kind === "truth") return value ? "yes" : "no";
  if (kind === "text") return name === "token" ? S.visible(value) : String(value);
  return kind === "whole" ? String(value) : S.number(value);
};
