// Charts of Vega-Lite, drawn again when the theme changes. `ast` has them interpreted: nothing is evaluated.
const swapped = {
  "#3b4252": "#d5dae3", // ink
  "#e5e9f0": "#2b3038", // grid
  "#aeb6c4": "#59616e", // axes
  "#eceff4": "#2b3038", // cells that were not measured
  "#fefefe": "#15171b", // gaps between cells
};
function inTheme(item) {
  if (typeof item === "string") return swapped[item] ?? item;
  if (Array.isArray(item)) return item.map(inTheme);
  if (item === null || typeof item !== "object") return item;
  const kept = ([key, value]) => [key, key === "values" ? value : inTheme(value)]; // of the data nothing is a colour
  return Object.fromEntries(Object.entries(item).map(kept));
}
const tooltip = { disableDefaultStyle: true, id: "vg-tooltip-element" };
const options = { ast: true, renderer: "svg", actions: false, defaultStyle: false, tooltip };
function draw() {
  for (const place of document.querySelectorAll("[data-chart]")) {
    const spec = window.curvlens.data.charts[place.dataset.chart];
    const { config = {}, ...rest } = window.curvlens.dark() ? inTheme(spec) : structuredClone(spec);
    window.vegaEmbed(place, { ...rest, config: { ...config, background: "transparent" } }, options);
  }
}
window.curvlens.onTheme(draw);
draw();
