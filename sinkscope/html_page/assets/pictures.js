"use strict";
// Maps over pictures: shaded patches on top of each picture.

S.SHADED = { visual_patch: ["mass", "phi", "random_share"], encoder_patch: ["norm", "mass"] };

S.pictures = () => {
  const table = S.table("visual_patch") ?? S.table("encoder_patch"), pictures = S.table("picture");
  if (!table?.length || !pictures?.length) return null;
  const columns = S.SHADED[table.name].map((name) => table.columns.find((column) => column.name === name));
  const layers = table.distinct("layer"), names = new Map(pictures.all.map((row) => [pictures.get("sequence")[row], row]));
  const state = { column: columns[0], layer: layers.at(-1), sequence: table.distinct("sequence")[0], tile: null };
  return S.section("pictures", "Pictures", "What each patch of a picture receives, or how large its token is.",
    ...S.panel((redraw) => {
      const wanted = { layer: state.layer, sequence: state.sequence };
      const all = table.where(wanted).filter((row) => table.get("row")[row] >= 0);
      const tiles = table.has("tile") ? table.distinct("tile", all) : [null];
      if (!tiles.includes(state.tile)) state.tile = tiles.at(-1);
      const rows = state.tile === null ? all : all.filter((row) => table.get("tile")[row] === state.tile);
      const at = names.get(state.sequence), name = pictures.get("name")[at];
      const image = S.element("img", { src: pictures.get("thumbnail")[at], alt: name, style: "height:14rem" });
      const about = S.aboutColumn(state.column);
      return [[S.choose("Number", columns, state, "column", redraw, (column) => S.aboutColumn(column).label),
        S.choose("Layer", layers, state, "layer", redraw),
        S.choose("Picture", table.distinct("sequence"), state, "sequence", redraw, (at) => pictures.get("name")[names.get(at)]),
        tiles.length > 1 ? S.choose("Tile", tiles, state, "tile", redraw) : null],
      S.element("figure.map", {}, S.element("figcaption", {}, S.visible(name)), image),
      S.mapOf(table, rows, "row", "column", state.column.name, { title: `${about.label}, layer ${state.layer}`, maxCell: 14,
        scale: S.colorScale(rows.map((row) => table.get(state.column.name)[row])) }), S.leftOut(table)];
    }, "div.panels"));
};
