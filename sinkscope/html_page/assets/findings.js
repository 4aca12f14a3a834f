"use strict";
// Findings in the sentences of the verdict; their numbers are those of the tables.

/** Text with `code` between backticks. */
S.sentence = (text) =>
  text.split("`").map((part, at) => (at % 2 ? S.element("code", {}, S.visible(part)) : part));

S.badge = (outcome) => S.element(`span.badge.${outcome.replaceAll(" ", "-")}`, {}, outcome);

/** A value and its interval as text. */
S.interval = (value, low, high, text = S.number) => {
  const known = [low, high].every(Number.isFinite) && low !== high;
  return `${text(value)}${known ? ` [${text(low)}, ${text(high)}]` : ""}`;
};

/** Numbers at a glance: what each means, what nothing would give, and where other models are. */
S.glances = () => {
  const { glances, metrics } = S.data;
  if (!glances.length) return null;
  const card = ({ metric, title, value, meaning, null: nothing, elsewhere }) =>
    S.element("li", { title: metrics[metric].definition }, S.element("h3", {}, title),
      S.element("p", {}, S.element("strong", {}, value), ` ${meaning}`), S.element("p.note", {}, `${nothing} ${elsewhere}`));
  return S.section("glances", "At a glance", "What each number means, what it would be without a sink, and what three models have on 100 sequences of 64 tokens.",
    S.element("ul.glances", {}, ...glances.map(card)));
};

S.finding = (one) =>
  S.element("li", {}, S.badge(one.outcome), " ", one.headline ? S.element("strong", {}, ...S.sentence(`${one.section}: `)) : null,
    ...S.sentence(one.sentence),
    one.claim ? S.element("p.note", {}, `To be compared with claim ${one.claim} of ${one.paper}: “${one.statement}”`) : null,
    one.published.length
      ? S.element("details", {}, S.element("summary", {}, "Published values"), ...one.published.map((line) => S.element("p.note", {}, line)))
      : null);

/** The findings in words, below the table that sums up an experiment, a training or a sweep. */
S.findings = () => {
  const { findings: found, overviews } = S.data;
  if (!found.length && !overviews.length) return S.findingTable();
  const headlines = found.filter((one) => one.headline);
  const sections = d3.groups(found.filter((one) => !one.headline), (one) => one.section);
  const table = ({ title, columns, rows }) =>
    S.plainTable(columns.map((label, at) => ({ label, number: at > 0 && rows.every((row) => /^[-+–\d]|^$/.test(row[at])) })), rows, title || "In numbers");
  return S.section("findings", overviews.length ? "Summary" : "Findings",
    S.data.spread === false ? "" : "± is the standard deviation over random controls or seeds; other ranges are 95 % intervals.",
    S.element("ul.findings.headlines", {}, ...headlines.map(S.finding)), ...overviews.slice(0, 1).map(table),
    ...overviews.slice(1).map((one) => S.element("details", {}, S.element("summary", {}, one.title), table(one))),
    ...sections.map(([section, own]) =>
      S.element("details", { open: !headlines.length && !overviews.length }, S.element("summary", {}, ...S.sentence(`${section} (${own.length})`)),
        S.element("ul.findings", {}, ...own.map(S.finding)))), S.findingNumbers(true));
};

/** The numbers of the findings, if tables for the sentences are missing. */
S.findingTable = () => {
  const numbers = S.findingNumbers(false);
  return numbers &&
    S.section("findings", "Findings", "The numbers that the verdict states, with their 95 % intervals.", numbers);
};

/** The numbers of the verdict, for several runs side by side; null if there are none. */
S.findingNumbers = (onlyOfSeveral) => {
  const table = S.table("finding");
  if (!table) return null;
  const labels = S.runLabels(table), several = labels.some(Boolean);
  const rows = table.all.map((at) => ({ ...table.row(at), label: labels[at] })).filter((row) => row.number === "value");
  if (!rows.length || (onlyOfSeveral && !several)) return null;
  if (several) return S.findingsByRun(rows);
  return S.plainTable(
    [{ label: "Finding" }, { label: "Value [95 %]", number: true }, { label: "Null", number: true },
      { label: "Threshold", number: true }, { label: "Outcome" }, { label: "Claim" }],
    rows.map((row) => [row.finding, S.interval(row.value, row.low, row.high), S.number(row.null), S.number(row.threshold),
      row.outcome, row.claim ?? ""]), "Findings");
};

/** One row per finding, one column per run. */
S.findingsByRun = (rows) => {
  const runs = [...new Set(rows.map(({ label }) => label))];
  const outcome = (row) => (row.outcome === "measured" ? "" : `, ${row.outcome}`);
  const cell = (own) => own.map((row) => S.interval(row.value, row.low, row.high) + outcome(row)).join(" / ") || "–";
  return S.plainTable(
    [{ label: "Finding" }, ...runs.map((label) => ({ label: S.visible(label), number: true })), { label: "Threshold", number: true },
      { label: "Claim" }],
    d3.groups(rows, ({ finding }) => finding).map(([finding, own]) => [finding.replaceAll("-", " "),
      ...runs.map((label) => cell(own.filter((row) => row.label === label))), S.number(own[0].threshold), own[0].claim ?? ""]),
    "Findings by run: value [95 %] and outcome");
};
