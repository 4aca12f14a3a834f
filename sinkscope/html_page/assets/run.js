"use strict";
// The configuration of the run, and the command that repeats it.

S.runSection = () => {
  const { manifest, commands, links, absent } = S.data;
  return S.section("run", "Configuration", "All of run.json, and the command that repeats it.",
    commands.length ? S.element("div", {}, S.element("h3", {}, "To repeat it"), ...commands.flatMap((line, at) =>
      [at ? S.element("p.note", {}, "Or, without this folder, by the options that differ from their defaults:") : "",
        S.element("pre", { tabindex: 0 }, S.element("code", {}, S.visible(line)))])) : "",
    Object.keys(links).length ? S.element("div", {}, S.element("h3", {}, "Pages of its runs"), S.element("ul", {},
      ...Object.entries(links).map(([label, page]) => S.element("li", {}, S.element("a", { href: page }, S.visible(label)))))) : "",
    absent.length ? S.element("p.note", {}, `Not in this folder: ${absent.map(S.visible).join(", ")}.`) : "",
    S.element("h3", {}, "run.json"), S.tree(manifest));
};

S.tree = (value) =>
  S.element("dl.tree", {}, ...Object.entries(value).flatMap(([name, part]) => {
    const isNested = part !== null && typeof part === "object" && Object.keys(part).length > 0;
    const isList = Array.isArray(part) && part.every((one) => typeof one !== "object");
    const isShort = isList && (part.length <= 8 || new Set(part).size === 1);
    const count = isNested && !isShort ? Object.keys(part).length : 0;
    const inside = count
      ? S.element("details", {}, S.element("summary", {}, count === 1 ? "1 entry" : `${count} entries`),
        isList ? S.element("div", {}, S.visible(shortened(part))) : S.tree(part))
      : S.visible(isNested ? shortened(part) : part === null ? "–" : typeof part === "object" ? "–" : part);
    return [S.element("dt", {}, S.visible(name)), S.element("dd", {}, inside)];
  }));

/** The values of a list, or one value and its count if all are equal. */
const shortened = (values) =>
  new Set(values).size === 1 && values.length > 3 ? `${values[0]} (${values.length} times)` : values.join(", ");
