// Charts of Vega-Lite. `ast` has them interpreted: nothing is evaluated. The colours of the theme are in charts.css.
const tooltip = { disableDefaultStyle: true, id: "vg-tooltip-element" };
const options = { ast: true, renderer: "svg", actions: false, defaultStyle: false, tooltip };

// The width for a chart. Inside of a closed fold nothing has a width: then it is that of what is around it.
function room(place) {
  let inset = 4;
  let box = place;
  for (; box && !box.clientWidth; box = box.parentElement) inset += 8;
  return Math.max((box ?? document.body).clientWidth - inset, 160);
}
// Charts of width "container" take the width they find, up to `usermeta.widest`; panels take as many rows as they need.
function fitted(spec, width) {
  const chart = structuredClone(spec);
  const { widest, margin = 60 } = chart.usermeta ?? {};
  if (chart.facet && chart.columns) {
    chart.spec.width = Math.min(chart.spec.width, width - margin);
    chart.columns = Math.max(1, Math.min(chart.columns, Math.floor((width - margin + 20) / (chart.spec.width + 20))));
  } else if (chart.width === "container") {
    chart.width = Math.min(width, widest ?? width);
    chart.autosize = { type: "fit-x", contains: "padding" };
  }
  chart.config = { ...chart.config, background: "transparent" };
  return chart;
}
const widths = new Map();
async function draw(place) {
  const width = room(place);
  if (Math.abs((widths.get(place) ?? -99) - width) < 8) return;
  widths.set(place, width);
  await window.vegaEmbed(place, fitted(window.curvlens.data.charts[place.dataset.chart], width), options);
}
// What is seen comes first; the rest one by one, so that the page answers in between. Printing needs all of them.
async function drawAll() {
  const places = [...document.querySelectorAll("[data-chart]")];
  const hidden = (place) => Number(place.closest("details:not([open])") !== null);
  for (const place of places.sort((a, b) => hidden(a) - hidden(b))) {
    await draw(place);
    await new Promise((go) => setTimeout(go));
  }
}
let waiting;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 150);
});
document.addEventListener("toggle", (event) => event.target.querySelectorAll("[data-chart]").forEach(draw), true);
drawAll();
