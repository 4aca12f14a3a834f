"use strict";
// Overflow: the largest magnitude of each site by layer, below or above the limit of the dtype.

S.overflow = () => {
  const table = S.table("overflow");
  if (!table) return null;
  const { dtype, limit } = S.manifest.overflow;
  const state = { inside: false };
  return S.section("overflow", "Overflow", `The largest magnitude of each site, and the largest number of ${dtype}.`,
    ...S.panel((redraw) => {
      const rows = table.all.filter((row) => table.get("layer")[row] >= 0 && Boolean(table.get("is_inside")[row]) === state.inside);
      const largest = d3.rollup(rows, (own) => d3.max(own, (row) => table.get("largest")[row]),
        (row) => table.get("site")[row], (row) => table.get("layer")[row]);
      const sites = d3.sort(largest.keys(), (site) => -d3.max(largest.get(site).values())).slice(0, S.COLORS.length - 1);
      const layers = d3.extent(rows, (row) => table.get("layer")[row]);
      const points = [...sites.flatMap((site) => [...largest.get(site)].map(([x, y]) => ({ x, y, group: site }))),
        ...layers.map((x) => ({ x, y: limit, group: `limit of ${dtype}` }))];
      const text = (inside) => (inside ? "inside norms and attention, if decomposed" : "tensors");
      return [[S.choose("Numbers", [false, true], state, "inside", redraw, text)], S.lines({ points, x: { label: "layer" },
        y: { label: "largest |entry|", unit: "", text: S.number }, log: true, title: `Largest entries by layer: ${text(state.inside)}` })];
    }));
};

S.OF_COMMANDS.push(S.overflow);
