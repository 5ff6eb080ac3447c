// Parts of the drawer of a block: a density, bars, rows. Texts go in by textContent only: names are hostile.
const WIDE = 330, TALL = 92, LOW = 16; // pixels of the drawing of a density; LOW is for the labels below it

function made(kind, text, cls) {
  const element = document.createElement(kind);
  if (text !== undefined) element.textContent = text;
  if (cls) element.className = cls;
  return element;
}
function drawn(kind, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Bins are even on the axis, heights are logarithms: steps from left to right, with gaps.
// A height is one character: tenths of a decade below 1; a space is a gap.
const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
function shares(part, short) {
  const steps = (text) => [...text].map((digit) => (digit === " " ? null : DIGITS.indexOf(digit)));
  const share = steps(part.share), low = steps(part.low), high = steps(part.high), count = share.length;
  const x = (i) => (WIDE * i) / count, y = (height) => 4 + ((TALL - 4) * height) / part.least;
  const svg = drawn("svg", { viewBox: `0 0 ${WIDE} ${TALL + LOW}`, width: WIDE, height: TALL + LOW, role: "img" });
  svg.setAttribute("aria-label", `${part.title}: shares of eigenvalues from ${short(part.ends[0])} to ${short(part.ends[1])}`);
  let band = "", line = "", pen = false;
  share.forEach((height, i) => {
    const [top, bottom] = [y(high[i]), y(low[i])];
    if (bottom - top > 0.01) band += `M${x(i)} ${top}H${x(i + 1)}V${bottom}H${x(i)}Z`;
    if (height !== null) line += `${pen ? "L" : "M"}${x(i)} ${y(height)}H${x(i + 1)}`;
    pen = height !== null;
  });
  for (let decade = 0; decade < part.least; decade += 10) {
    svg.append(drawn("line", { x1: 0, x2: WIDE, y1: y(decade), y2: y(decade), class: "grid" }));
    if (decade % 20 === 0) svg.append(drawn("text", { x: WIDE, y: y(decade) + 9, class: "tall" }, decade ? short(10 ** (-decade / 10)) : "share 1"));
  }
  svg.append(drawn("path", { d: band, class: "band" }), drawn("path", { d: line, class: "line" }));
  const zero = WIDE * part.zero, base = TALL + LOW - 3;
  svg.append(
    drawn("line", { x1: zero, x2: zero, y1: 4, y2: TALL, class: "zero" }),
    drawn("line", { x1: 0, x2: WIDE, y1: TALL, y2: TALL, class: "base" }),
    drawn("text", { x: 0, y: base }, `λ ${short(part.ends[0])}`),
    drawn("text", { x: zero, y: base, class: "middle" }, "0"),
    drawn("text", { x: WIDE, y: base, class: "right" }, short(part.ends[1])),
  );
  return [svg, ...(part.note ? [made("p", part.note, "faint")] : [])];
}
function bars(part) {
  const list = made("ul", undefined, "bars");
  for (const [name, said, length] of part.bars) {
    const item = made("li"), track = made("span", undefined, "track"), bar = made("i");
    bar.style.width = `${Math.abs(length) / 10}%`;
    bar.classList.toggle("minus", length < 0);
    track.append(bar);
    item.append(made("span", name, "name"), track, made("span", said, "number"));
    list.append(item);
  }
  return [list, ...(part.left ? [made("p", `and ${part.left} more`, "faint")] : [])];
}
function rows(part) {
  const grid = made("table"), head = made("tr");
  head.append(...part.columns.map((title, i) => made("th", title, i ? "number" : "")));
  grid.append(head);
  for (const texts of part.rows) {
    const row = made("tr");
    const first = made("th");
    first.append(made("div", texts[0], "long"));
    row.append(first, ...texts.slice(1).map((text) => made("td", text, "number")));
    grid.append(row);
  }
  return [grid];
}
const KINDS = { shares, bars, rows };
// `shared` has what many parts have in common.
function part(own, shared, short, python) {
  const data = { line: "", ...shared[own.about], ...own }, box = made("div", undefined, "part");
  if (data.rows) data.rows = data.rows.map((row) => shared[row]);
  box.append(made("h4", data.title), ...KINDS[data.kind](data, short));
  if (data.line) box.append(made("code", python(data.line)));
  return box;
}
window.curvlens.drawerPart = part;
