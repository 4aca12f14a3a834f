"use strict";
// The page: the sections that the tables allow, in order.

S.SECTIONS = () => [S.glances, S.findings, ...S.OF_COMMANDS, S.training, S.text, S.pictures, S.heads,
  S.layers, S.massive, S.gradients, ...S.TOPICS.map((topic) => () => S.topic(topic)), S.explore, S.tablesSection, S.runSection];

// sections that are folded until a click, or their link, opens them: on every page, and where glances come first
S.OF_EXPERTS = new Set(["layers", "massive", "gradient", "explore", "tables", "run", ...S.TOPICS.map(({ id }) => id)]);
S.OF_DETAILS = new Set(["findings"]);

S.isFolded = ({ id }) => S.OF_EXPERTS.has(id) || (S.OF_DETAILS.has(id) && S.data.glances.length > 0) ||
  (id === "heads" && S.data.overviews.length > 0);

S.fold = (section) => {
  const [title, ...rest] = section.childNodes;
  section.replaceChildren(S.element("details.fold", {}, S.element("summary", {}, title), ...rest));
};

/** Open the section that the address names. */
S.unfold = () => {
  const fold = document.querySelector(`[id="${CSS.escape(location.hash.slice(1))}"] > details.fold`);
  if (fold) fold.open = true;
};

S.title = () => {
  const title = S.manifest.config?.content?.title; // of the file that the command read
  if (title) return S.visible(title);
  if (typeof S.manifest.model === "string") return S.visible(S.manifest.model);
  const models = [...new Set([...S.tables.values()].flatMap((table) => (table.has("model") ? table.distinct("model") : [])))];
  const name = (model) => (S.manifest.command === "train" ? model.split(":")[0] : model); // without its sizes
  return S.visible(models.length > 3 ? `${models.length} models` : models.map(name).join(", ") || S.manifest.command);
};

S.facts = () => {
  const { manifest } = S.data;
  const input = manifest.input ?? {};
  const facts = [
    ["command", `sinkscope ${manifest.command}`], ["condition", manifest.condition],
    ["sequences", input.sequences], ["tokens each", input.shortest === input.longest ? input.shortest : `${input.shortest}–${input.longest}`],
    ["position 0", input.token_zero], ["dtype", manifest.dtype], ["ε", manifest.config?.epsilon],
    ["measured", manifest.started?.slice?.(0, 10)],
  ].filter(([, value]) => value !== undefined && value !== null && value !== "undefined–undefined");
  return S.element("dl.facts", {}, ...facts.flatMap(([name, value]) =>
    [S.element("div", {}, S.element("dt", {}, name), S.element("dd", {}, S.visible(value)))]));
};

/** A section; if it fails, the page says so and still has the other sections. */
S.made = (make) => {
  try {
    return make();
  } catch (error) {
    console.error(error);
    return S.section(S.newId("failed"), "Not shown", `This part of the page failed, please report it: ${error.message}`);
  }
};

S.start = async () => {
  S.load(document.getElementById("data").textContent);
  S.maps = await S.unpacked(S.data.maps);
  const title = S.title();
  document.title = `${title} – sinkscope`;
  const sections = S.SECTIONS().map(S.made).filter(Boolean);
  sections.filter(S.isFolded).forEach(S.fold);
  const links = sections.map((section) =>
    S.element("li", {}, S.element("a", { href: `#${section.id}` }, section.querySelector("h2").textContent)));
  document.body.append(
    S.element("a.skip", { href: "#main" }, "Skip to the content"),
    S.element("header", {}, S.element("h1", {}, title), S.facts(),
      S.element("nav", { "aria-label": "Sections" }, S.element("ul", {}, ...links))),
    S.element("main", { id: "main" }, ...sections),
    S.element("footer", {},
      S.element("p", {}, "Papers: ", Object.entries(S.data.papers).map(([name, title]) => `${name} – ${title}`).join("; "), "."),
      S.element("p", {}, `Made by sinkscope ${S.data.version} from the tables of this folder. Nothing on this page is loaded from a network.`)),
    S.tip);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") S.hideTip(); });
  window.addEventListener("hashchange", S.unfold);
  S.unfold();
  document.body.dataset.ready = "true";
};

S.start();
