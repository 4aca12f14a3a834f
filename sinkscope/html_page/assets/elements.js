"use strict";
// Elements of the page. Text is always inserted as text, never as markup: a token may be `<script>`.

S.OF_COMMANDS = []; // functions that make the sections of one command, which its script adds

/** An element: its name with classes (`p.note`), attributes and event handlers, and its content. */
S.element = (what, attributes = {}, ...inside) => {
  const [name, ...classes] = what.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...inside.flat().filter((one) => one !== null && one !== undefined && one !== ""));
  return node;
};

let lastId = 0;
S.newId = (name) => `${name}-${++lastId}`;

/** A section of the page, with an entry in the navigation. */
S.section = (id, title, about, ...inside) =>
  S.element(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    S.element("h2", { id: `${id}-title` }, title),
    about ? S.element("p.about", {}, about) : null,
    ...inside,
  );

/** A labeled choice. `choices`: values, or pairs [value, text], or pairs by group. */
S.select = (label, choices, chosen, change) => {
  const id = S.newId("select");
  const option = (choice) => {
    const [value, text] = Array.isArray(choice) ? choice : [choice, choice];
    return S.element("option", { value: String(value), selected: String(value) === String(chosen) }, S.visible(text));
  };
  const grouped = Array.isArray(choices)
    ? choices.map(option)
    : Object.entries(choices).map(([group, own]) => S.element("optgroup", { label: group }, ...own.map(option)));
  const select = S.element("select", { id, onchange: () => change(select.value) }, ...grouped);
  return S.element("div.control", {}, S.element("label", { for: id }, label), select);
};

/** A choice among values that keep their type. */
S.pick = (label, values, chosen, change, text = S.value) =>
  S.select(label, values.map((value, at) => [at, text(value)]), values.indexOf(chosen), (at) => change(values[at]));

/** A choice that sets state[name] and draws again. */
S.choose = (label, values, state, name, redraw, text = S.value) =>
  S.pick(label, values, state[name], (value) => { state[name] = value; redraw(); }, text);

S.chooseMetric = (metrics, state, redraw) =>
  S.choose("Metric", metrics, state, "metric", redraw, (name) => S.aboutMetric(name).label);

/** Controls and the content that depends on them. draw(redraw): [controls, ...content]; `kind`: classes of the content. */
S.panel = (draw, kind = "div") => {
  const controls = S.element("div.controls"), place = S.element(kind);
  const redraw = () => {
    const [chosen, ...content] = draw(redraw);
    S.setControls(controls, ...chosen);
    place.replaceChildren(...content.filter(Boolean));
  };
  redraw();
  return [controls, place];
};

S.checkbox = (label, checked, change) => {
  const id = S.newId("check");
  const box = S.element("input", { id, type: "checkbox", checked, onchange: () => change(box.checked) });
  return S.element("div.control.check", {}, box, S.element("label", { for: id }, label));
};

/** A slider over values, with the chosen value as text. */
S.slider = (label, values, chosen, change) => {
  const id = S.newId("slider");
  const shown = S.element("output", { for: id }, S.value(chosen));
  const slider = S.element("input", {
    id, type: "range", min: 0, max: values.length - 1, step: 1, value: values.indexOf(chosen),
    "aria-valuetext": S.value(chosen),
    oninput: () => {
      const value = values[slider.value];
      shown.textContent = S.value(value);
      slider.setAttribute("aria-valuetext", S.value(value));
      change(value);
    },
  });
  return S.element("div.control.slider", {}, S.element("label", { for: id }, label), slider, shown);
};

/** Boxes to choose several values, at least one. Random controls, which may be many, are folded away. */
S.several = (label, values, chosen, change) => {
  const boxes = values.map((value) => {
    const id = S.newId("box");
    const box = S.element("input", {
      id, type: "checkbox", checked: chosen.includes(value),
      onchange: () => {
        const now = values.filter((one, at) => boxes[at].firstChild.checked);
        if (now.length) change(now);
        else box.checked = true;
      },
    });
    return S.element("span.check", {}, box, S.element("label", { for: id }, S.visible(value)));
  });
  const controls = boxes.filter((box, at) => S.isControl(String(values[at])));
  const fold = controls.length > 1 ? S.element("details", { open: controls.some((box) => box.firstChild.checked) },
    S.element("summary", {}, `Random controls (${controls.length})`), S.element("div.boxes", {}, ...controls)) : null;
  const first = fold ? boxes.filter((box) => !controls.includes(box)) : boxes;
  return S.element("fieldset.several", {}, S.element("legend", {}, label), S.element("div.boxes", {}, ...first), fold);
};

/**
 * Put controls into an element. If the same controls are there already, they stay, so that a slider can be dragged further;
 * otherwise the control with the same label gets the focus again.
 */
S.setControls = (place, ...controls) => {
  const wanted = controls.filter(Boolean);
  const signature = (one) => [...one.querySelectorAll("label, legend, option")].map((part) => part.textContent).join("\n") +
    [...one.querySelectorAll("input, select")].map((part) => [part.max, part.type === "checkbox" ? part.checked : part.value]).join();
  const same = wanted.length === place.childElementCount && wanted.every((one, at) => signature(one) === signature(place.children[at]));
  if (same) return;
  const labelOf = (node) => node?.closest(".control")?.querySelector("label");
  const before = place.contains(document.activeElement) ? labelOf(document.activeElement)?.textContent : undefined;
  place.replaceChildren(...wanted);
  const again = before && [...place.querySelectorAll(".control label")].find((label) => label.textContent === before);
  if (again) document.getElementById(again.htmlFor).focus();
};

// --- tooltips

S.tip = S.element("div", { id: "tip", role: "tooltip", hidden: true });

S.showTip = (text, { clientX, clientY }) => {
  S.tip.textContent = text;
  S.tip.hidden = false;
  const { width, height } = S.tip.getBoundingClientRect();
  const left = Math.min(clientX + 12, document.documentElement.clientWidth - width - 4);
  const top = clientY + 16 + height > window.innerHeight ? clientY - height - 10 : clientY + 16;
  S.tip.style.left = `${Math.max(4, left)}px`;
  S.tip.style.top = `${Math.max(4, top)}px`;
};

S.hideTip = () => {
  S.tip.hidden = true;
};

/** Show a text at an element while the pointer or the focus is on it. */
S.withTip = (node, text) => {
  const atNode = () => {
    const { left, bottom } = node.getBoundingClientRect();
    S.showTip(text(), { clientX: left, clientY: bottom - 10 });
  };
  node.addEventListener("pointermove", (event) => S.showTip(text(), event));
  node.addEventListener("pointerleave", S.hideTip);
  node.addEventListener("focus", atNode);
  node.addEventListener("blur", S.hideTip);
  return node;
};

// --- numbers

S.CELLS_AT_ONCE = 300; // of a table: the page stays responsive while a long one is made
S.ROWS_AT_ONCE = 16; // more rows scroll

/** A plain table; later rows of a long one are added step by step. `columns`: [{label, title, number}]; `rows`: arrays of texts. */
S.plainTable = (columns, rows, caption = "") => {
  const body = S.element("tbody"), atOnce = Math.ceil(S.CELLS_AT_ONCE / columns.length);
  const line = (row) => S.element("tr", {}, ...row.map((text, at) => S.element(columns[at].number ? "td.number" : text.length < 24 ? "td.short" : text.length > 40 ? "td.long" : "td", {}, text)));
  const go = (from) => {
    body.append(...rows.slice(from, from + atOnce).map(line));
    if (from + atOnce < rows.length) setTimeout(() => go(from + atOnce));
  };
  go(0);
  return S.element(
    rows.length > S.ROWS_AT_ONCE ? "div.scroll.rows" : "div.scroll",
    { tabindex: 0, role: "group", "aria-label": caption || "table" },
    S.element(
      "table",
      {},
      caption ? S.element("caption", {}, S.element("span", {}, caption)) : null,
      S.element("thead", {}, S.element("tr", {}, ...columns.map(({ label, title, number }) =>
        S.element(number ? "th.number" : "th", { scope: "col", title }, label)))),
      body,
    ),
  );
};

/** The numbers of a chart, as a table that is made when it is opened. */
S.numbers = (makeTable, title = "Numbers") => {
  const details = S.element("details.numbers", {}, S.element("summary", {}, title));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(S.downloads(details), makeTable());
  });
  return details;
};

/** Buttons that save the numbers, and the picture of the chart that they belong to. */
S.downloads = (details) => {
  const svg = () => details.closest("figure")?.querySelector(".chart svg, .scroll-map svg");
  const name = () => (details.closest("figure")?.getAttribute("aria-label") ?? details.querySelector("caption")?.textContent ?? "numbers")
    .replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60);
  const cell = (node) => `"${node.textContent.replaceAll('"', '""')}"`;
  const csv = () => [...details.querySelectorAll("tr")].map((row) => [...row.children].map(cell).join(",")).join("\n");
  const button = (text, act) => S.element("button", { type: "button", onclick: act }, text);
  return S.element("div.downloads", {},
    button("CSV", () => S.save(`${name()}.csv`, "text/csv", csv())),
    svg() ? button("SVG", () => S.save(`${name()}.svg`, "image/svg+xml", S.standalone(svg()))) : null,
    svg() ? button("PNG", () => S.savePng(`${name()}.png`, svg())) : null);
};

S.save = (name, type, text) => S.follow(name, URL.createObjectURL(new Blob([text], { type })));

S.follow = (download, href) => {
  S.element("a", { href, download }).click();
  if (href.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(href), 1000);
};

/** A chart as a file of its own: with the colors that the page's style gives it. */
S.standalone = (svg) => {
  const copy = svg.cloneNode(true), styles = ["fill", "stroke", "font-family", "font-size"];
  const [own, copied] = [svg, copy].map((root) => [root, ...root.querySelectorAll("*")]);
  own.forEach((node, at) => {
    const style = getComputedStyle(node);
    styles.forEach((name) => {
      copied[at].style.setProperty(name, style.getPropertyValue(name));
      copied[at].removeAttribute(name); // may name a color of the page
    });
  });
  copy.style.background = getComputedStyle(document.body).backgroundColor;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
};

S.savePng = async (name, svg) => {
  const { width, height } = svg.getBoundingClientRect(), picture = new Image(), canvas = document.createElement("canvas");
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(S.standalone(svg))}`;
  await picture.decode();
  [canvas.width, canvas.height] = [3 * width, 3 * height]; // sharp in print
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  S.follow(name, canvas.toDataURL("image/png"));
};
