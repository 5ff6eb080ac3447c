// The tree of a profile: cells that can be zoomed into. Texts go in by textContent only: names of modules are hostile.
function icicle(root, data) {
  const names = ["tree", "whole", "link", "tip", "crumbs", "choice", "scale", "words"];
  const [tree, whole, link, tip, crumbs, choice, scale, words] = names.map((name) => root.querySelector("." + name));
  const rows = data.rows;
  const below = rows.map(() => []);
  rows.forEach((row, i) => row.parent >= 0 && below[row.parent].push(i));
  rows.forEach((row) => (row.depth = row.parent < 0 ? 0 : rows[row.parent].depth + 1));
  const MANY = 600; // rows above which nothing moves smoothly
  const LINE = 4, SMALL = 11, LABEL = 15, TWO = 34; // pixels that a line between cells, a small label, one, and two need
  let quantity = data.quantity, focus = 0, active = null;

  function make(kind, text, cls) {
    const element = document.createElement(kind);
    if (text !== undefined) element.textContent = text;
    if (cls) element.className = cls;
    return element;
  }
  const number = (part, name) => (part && part[name] ? part[name] : [null, "not known", ""]);
  const unit = (found, name) => (found[0] === null ? "" : data.quantities[name].unit);
  const short = (part) => number(part, quantity)[1] + unit(number(part, quantity), quantity);
  function full(part, name) {
    const found = number(part, name);
    return found[1] + (found[2] ? " ± " + found[2] : "") + unit(found, name);
  }

  // Cells: one for each row, and one for the own code of a row that has others in it.
  const cells = [];
  rows.forEach((row, i) => {
    cells.push({ row, i, own: false, part: row.total, depth: row.depth });
    if (below[i].length) cells.push({ row, i, own: true, part: row.own, depth: row.depth + 1 });
  });
  const ofRow = new Map(cells.filter((c) => !c.own).map((c) => [c.i, c]));
  const ownOf = new Map(cells.filter((c) => c.own).map((c) => [c.i, c]));
  for (const cell of cells) {
    const label = cell.own ? "own code" : cell.row.name;
    cell.element = make("div", undefined, "cell" + (cell.own ? " own" : ""));
    cell.first = make("span", undefined, "first");
    cell.first.append(make("b", label), make("span"));
    cell.element.append(cell.first, make("span", cell.own ? "of " + cell.row.name : cell.row.kind, "second"));
    cell.element.setAttribute("role", "treeitem");
    cell.element.setAttribute("aria-level", cell.depth + 1);
    cell.element.tabIndex = -1;
    cell.element.addEventListener("click", () => zoom(!cell.own && cell.i === focus ? above(focus) : cell.i));
    cell.element.addEventListener("pointermove", (event) => show(cell, event.clientX, event.clientY));
    cell.element.addEventListener("pointerleave", hide);
    cell.element.addEventListener("blur", hide);
    cell.element.addEventListener("focus", () => {
      const box = cell.element.getBoundingClientRect();
      if (cell.element.matches(":focus-visible")) show(cell, box.left + Math.min(box.width, 160), box.top + 4);
      activate(cell);
    });
    tree.append(cell.element);
  }
  const above = (i) => Math.max(rows[i].parent, 0);
  const inside = (i, other) => {
    while (i > other) i = rows[i].parent;
    return i === other;
  };

  // Extents: Σ |own| of all that is in a row; what is not known gets room that means nothing.
  let extents, sizes, sum;
  function layout() {
    const values = rows.map((row) => number(row.own, quantity)[0]);
    const known = values.reduce((sum, x) => sum + Math.abs(x ?? 0), 0);
    const gaps = values.filter((x) => x === null).length;
    sizes = values.map((x) => (x === null ? (known || 1) / (2 * gaps) : Math.abs(x)));
    extents = sizes.slice();
    for (let i = rows.length - 1; i > 0; i--) extents[rows[i].parent] += extents[i];
    sum = extents[0];
    if (!sum) extents[0] = 1; // all is zero: the model alone is to be seen
    ofRow.get(0).from = 0;
    rows.forEach((_, i) => {
      const cell = ofRow.get(i);
      cell.to = cell.from + extents[i];
      let at = cell.from;
      for (const j of below[i]) {
        ofRow.get(j).from = at;
        at += extents[j];
      }
      const own = ownOf.get(i);
      if (own) [own.from, own.to] = [at, at + sizes[i]];
    });
  }

  function paint(element, part, largest) {
    const value = number(part, quantity)[0];
    element.classList.toggle("unknown", value === null);
    element.classList.toggle("positive", value > 0);
    element.classList.toggle("negative", value < 0);
    element.style.setProperty("--t", value ? Math.sqrt(Math.min(Math.abs(value) / largest, 1)) : 0);
  }

  function draw() {
    layout();
    for (const cell of cells) {
      cell.first.lastChild.textContent = "  " + short(cell.part);
      const what = cell.own ? "own code of " + (cell.row.path || "the model") : cell.row.path || "functional";
      cell.element.setAttribute("aria-label", what + ", " + data.quantities[quantity].title + " " + short(cell.part));
    }
    for (const button of choice.children) button.setAttribute("aria-pressed", button.dataset.name === quantity);
    place();
  }

  // The value of the full colour: the largest own code that is to be seen. Totals of many may be beyond it.
  function strongest() {
    const values = rows.map((row, i) => (inside(i, focus) ? Math.abs(number(row.own, quantity)[0] ?? 0) : 0));
    return Math.max(...values) || Math.abs(number(data.ggn, quantity)[0] ?? 0);
  }

  // How wide a text is; asked of a canvas, as cells may be in motion.
  const ruler = make("canvas").getContext("2d"), widths = new Map();
  function wide(text, small) {
    const font = (small ? "600 10px " : "600 12px ") + getComputedStyle(document.body).fontFamily;
    const key = font + text;
    if (!widths.has(key)) {
      ruler.font = font;
      widths.set(key, ruler.measureText(text).width);
    }
    return widths.get(key);
  }

  // Where there is no room for all, the class goes first, then the value goes below the name, and then it goes.
  function fit(element, pixels, width) {
    const room = width - (innerWidth <= 700 ? 7 : 15), small = pixels < LABEL;
    const [name, value] = [...element.firstChild.children].map((part) => part.textContent);
    const beside = wide(name + " " + value.trim(), small) <= room;
    const stacked = !beside && pixels >= TWO && wide(value.trim(), small) <= room;
    element.classList.toggle("stacked", stacked);
    element.classList.toggle("narrow", !beside && !stacked);
    element.classList.toggle("thin", pixels < LINE);
    element.classList.toggle("bare", pixels < SMALL);
    element.classList.toggle("small", small);
    element.classList.toggle("low", pixels < TWO || wide(element.lastChild.textContent, small) > room);
  }

  function place() {
    const { from, to } = ofRow.get(focus);
    const first = Math.max(rows[focus].depth - 1, 0);
    const seen = cells.filter((c) => c.to > from && c.from < to && c.depth >= first && c.to > c.from);
    const levels = 1 + Math.max(...seen.map((c) => c.depth)) - first;
    const height = tree.clientHeight;
    const kept = new Set(seen);
    const largest = strongest();
    for (const cell of cells) {
      const style = cell.element.style;
      if (!kept.has(cell) || (cell.depth === first && !inside(focus, cell.i))) {
        style.display = "none";
        continue;
      }
      const top = Math.max(cell.from, from), bottom = Math.min(cell.to, to);
      style.display = "";
      paint(cell.element, cell.part, largest);
      style.top = (100 * (top - from)) / (to - from) + "%";
      style.height = (100 * (bottom - top)) / (to - from) + "%";
      style.left = (100 * (cell.depth - first)) / levels + "%";
      style.width = 100 / levels + "%";
      fit(cell.element, (height * (bottom - top)) / (to - from), tree.clientWidth / levels);
    }
    drawWhole(largest);
    drawLegend(largest);
    link.style.visibility = focus ? "hidden" : "";
    crumbs.replaceChildren();
    for (const i of [...pathTo(focus)]) {
      const button = make("button", rows[i].name);
      button.disabled = i === focus;
      button.addEventListener("click", () => zoom(i));
      if (i) crumbs.append(" › ");
      crumbs.append(button);
    }
  }

  function pathTo(i) {
    return i < 0 ? [] : [...pathTo(rows[i].parent), i];
  }

  function drawWhole(largest) {
    const ggn = number(data.ggn, quantity)[0];
    const height = ggn === null ? extents[0] / 2 : Math.abs(ggn);
    const split = height + sum ? (100 * height) / (height + sum) : 50;
    whole.replaceChildren();
    const parts = [
      ["GGN", data.ggn, 0, split],
      ["functional", rows[0].total, split, 100 - split],
    ];
    for (const [name, part, top, tall] of parts) {
      const element = make("div", undefined, "cell");
      const first = make("span", undefined, "first");
      first.append(make("b", name), make("span", "  " + short(part)));
      element.append(first, make("span", name === "GGN" ? "Gauss–Newton part" : "all modules", "second"));
      Object.assign(element.style, { top: top + "%", height: tall + "%", left: 0, width: "100%" });
      fit(element, (whole.clientHeight * tall) / 100, whole.clientWidth);
      paint(element, part, largest);
      element.tabIndex = 0;
      element.setAttribute("role", "img");
      element.setAttribute("aria-label", name + ", " + data.quantities[quantity].title + " " + short(part));
      const cell = { row: { path: name, kind: "", total: part, own: null }, element };
      element.addEventListener("pointermove", (event) => show(cell, event.clientX, event.clientY));
      element.addEventListener("pointerleave", hide);
      element.addEventListener("blur", hide);
      element.addEventListener("focus", () => show(cell, 150, element.getBoundingClientRect().top));
      element.addEventListener("click", () => zoom(0));
      whole.append(element);
    }
    link.style.clipPath = `polygon(0 ${split}%, 100% 0, 100% 100%, 0 100%)`;
  }

  function drawLegend(largest) {
    const signed = quantity !== "frobenius";
    const ticks = signed ? [-1, -0.25, 0, 0.25, 1] : [0, 0.25, 1];
    scale.className = signed ? "scale both" : "scale single";
    scale.hidden = !largest;
    scale.replaceChildren(
      ...ticks.map((tick, i) => {
        const factor = data.quantities[quantity].unit ? 100 : 1;
        const bound = tick === 1 ? "≥ " : tick === -1 ? "≤ " : "";
        const text = Number((factor * tick * largest).toPrecision(3)) + data.quantities[quantity].unit;
        const span = make("span", bound + text.replace("-", "−"));
        span.style.left = (100 * i) / (ticks.length - 1) + "%";
        return span;
      }),
    );
    const gaps = rows.some((row) => number(row.own, quantity)[0] === null);
    const more = gaps ? " Hatched: not known; its height means nothing." : "";
    words.textContent = data.quantities[quantity].legend + more;
  }

  function show(cell, x, y) {
    const title = cell.own ? "own code of " + (cell.row.path || "the model") : cell.row.path || "functional";
    const table = make("table"), head = make("tr");
    head.append(make("th", ""), make("th", "total"), ...(cell.row.own ? [make("th", "own code")] : []));
    table.append(head);
    for (const name of Object.keys(data.quantities)) {
      if (!cell.row.total[name]) continue;
      const line = make("tr");
      line.append(make("th", data.quantities[name].title), make("td", full(cell.row.total, name)));
      if (cell.row.own) line.append(make("td", cell.row.own[name] ? full(cell.row.own, name) : ""));
      table.append(line);
    }
    tip.replaceChildren(make("strong", title), make("em", cell.row.kind), table);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(4, y + 16 + box.height > innerHeight ? y - box.height - 10 : y + 16) + "px";
  }
  function hide() {
    tip.hidden = true;
  }

  function activate(cell) {
    if (active) active.element.tabIndex = -1;
    active = cell;
    active.element.tabIndex = 0;
  }

  function zoom(i) {
    focus = i;
    hide();
    tree.classList.toggle("moving", rows.length <= MANY);
    place();
    activate(ofRow.get(i));
    active.element.focus({ preventScroll: true });
  }

  // Arrows walk to parent, first child and the neighbours of a column; Enter zooms in, Escape out.
  tree.addEventListener("keydown", (event) => {
    const cell = active;
    const shown = (c) => c && c.element.style.display !== "none";
    const column = cells.filter((c) => c.depth === cell.depth && shown(c)).sort((a, b) => a.from - b.from);
    const at = column.indexOf(cell);
    const children = cell.own ? [] : cells.filter((c) => shown(c) && c.depth === cell.depth + 1 && c.from >= cell.from);
    const parent = cell.own ? ofRow.get(cell.i) : ofRow.get(cell.row.parent);
    const next = {
      ArrowUp: column[at - 1],
      ArrowDown: column[at + 1],
      ArrowLeft: parent,
      ArrowRight: children.find((c) => c.to <= cell.to * (1 + 1e-12)),
      Home: ofRow.get(focus),
    }[event.key];
    if (event.key === "Enter" || event.key === " ") zoom(cell.i === focus && !cell.own ? above(focus) : cell.i);
    else if (event.key === "Escape" || event.key === "Backspace") zoom(above(focus));
    else if (shown(next)) next.element.focus();
    else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
  });

  for (const name of data.known) {
    const button = make("button", data.quantities[name].title);
    button.dataset.name = name;
    button.addEventListener("click", () => {
      quantity = name;
      draw();
    });
    choice.append(button);
  }
  // The filter of the page: modules without all its words are dimmed.
  document.addEventListener("page:filter", (event) => {
    for (const cell of cells) {
      const text = ((cell.row.path || "functional") + " " + cell.row.kind).toLowerCase();
      cell.element.classList.toggle("dim", !event.detail.words.every((word) => text.includes(word)));
    }
  });
  activate(ofRow.get(0));
  draw();
  new ResizeObserver(place).observe(tree);
}

for (const root of document.querySelectorAll("[data-icicle]")) {
  icicle(root, window.curvlens.data.icicles[root.dataset.icicle]);
}
