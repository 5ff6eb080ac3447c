// A heat map of blocks: layers as columns, roles as rows. Texts go in by textContent only: names are hostile.
function heat(root, data) {
  const [letters, quantities, words, map, legend, drawer] = [
    ".letters", ".quantities", ".words", ".map", ".legend", ".drawer",
  ].map((name) => root.querySelector(name));
  const VIRIDIS = ["#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
  const SIGNED = ["#7f3b08", "#b35806", "#e08214", "#fdb863", "#f0f0f0", "#92c5de", "#4393c3", "#2166ac", "#053061"];
  const MANY = 20; // layers that fit beside each other in wide cells
  const known = Object.keys(data.cells);
  const chosen = { letter: known.includes("G") ? "G" : (known[0] ?? "H"), quantity: "trace" };
  let opened = null;

  function make(kind, text, cls) {
    const element = document.createElement(kind);
    if (text !== undefined) element.textContent = text;
    if (cls) element.className = cls;
    return element;
  }
  function named(kind, text, cls) {
    const element = make(kind, text, cls);
    element.title = text;
    return element;
  }
  // Three digits; powers of ten as 2.1e4.
  function short(x, digits = 3) {
    if (x === null || x === undefined) return "";
    const size = Math.abs(x), sign = x < 0 ? "−" : "";
    if (size === 0 || (size >= 1e-3 && size < 1e4)) return sign + String(+size.toPrecision(digits));
    const [mantissa, power] = size.toExponential(digits - 1).split("e");
    return `${sign}${+mantissa}e${+power}`;
  }
  // An error that the digits shown do not reach is left out.
  function error(cell) {
    const size = cell[1] ?? 0;
    return size > 5e-4 * Math.abs(cell[0]) ? " ± " + short(size, 2) : "";
  }
  function said(cell) {
    if (!cell) return data.differences ? "not compared" : "not measured";
    const sign = data.differences && cell[0] > 0 ? "+" : "";
    return sign + short(cell[0]) + (cell[3] ? " (exact)" : error(cell));
  }
  // A colour between two steps of a ramp, 0 ≤ t ≤ 1.
  function mixed(ramp, t) {
    const place = Math.min(Math.max(t, 0), 1) * (ramp.length - 1), i = Math.min(Math.floor(place), ramp.length - 2);
    const channel = (hex, k) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16);
    const parts = [0, 1, 2].map((k) => Math.round(channel(ramp[i], k) + (place - i) * (channel(ramp[i + 1], k) - channel(ramp[i], k))));
    return `rgb(${parts.join(" ")})`;
  }
  const table = (letter, quantity) => (data.cells[letter] || {})[quantity];

  // One scale for H, G and F of a quantity: it does not jump when the operator is switched.
  function colours(quantity) {
    const coloured = (c) => c && c[0] !== 0 && (!data.differences || c[4]);
    const all = known.flatMap((letter) => table(letter, quantity) || []).filter(coloured);
    const sure = all.filter((c) => c[3] || Math.abs(c[0]) > (c[1] ?? 0)); // noise around 0 would stretch the scale
    const sizes = (sure.length ? sure : all).map((c) => Math.abs(c[0]));
    const high = sizes.reduce((a, b) => Math.max(a, b), 1e-300);
    const low = Math.max(sizes.reduce((a, b) => Math.min(a, b), high), high * (data.differences ? 1e-3 : 1e-6));
    // Colours of both signs only where the operator has both; sizes are on the same scale either way.
    const signed = data.differences || (table(chosen.letter, quantity) || []).some((c) => c && c[0] < 0);
    const span = Math.log10(high / low) || 1;
    const size = (x) => Math.min(Math.max(Math.log10(Math.max(Math.abs(x), low) / low) / span, 0), 1);
    const of = (x) => (signed ? mixed(SIGNED, 0.5 + (Math.sign(x) * (0.1 + 0.9 * size(x))) / 2) : mixed(VIRIDIS, size(x)));
    return { of, low, high, signed, ramp: signed ? SIGNED : VIRIDIS };
  }

  // Where the cells are: what comes before the layers at the left, the layers, what comes after them at the right.
  const layers = [...new Set(data.blocks.map((b) => b.layer).filter((x) => x !== null))];
  const roles = [...new Set(data.blocks.filter((b) => b.layer !== null).map((b) => b.role))];
  const first = data.blocks.findIndex((b) => b.layer !== null);
  const where = new Map(), sides = [[], []];
  data.blocks.forEach((block, i) => {
    const key = JSON.stringify([block.layer, block.role]);
    if (block.layer === null) sides[Number(first >= 0 && i > first)].push(i);
    else if (where.has(key)) sides[1].push(i);
    else where.set(key, i);
  });
  const cells = new Map(), places = new Map();

  function cell(i, row, column) {
    const button = make("button", undefined, "cell");
    button.type = "button";
    button.tabIndex = cells.size ? -1 : 0;
    button.addEventListener("click", () => open(i));
    button.addEventListener("focus", () => cells.forEach((other) => (other.tabIndex = other === button ? 0 : -1)));
    cells.set(i, button);
    places.set(i, [row, column]);
    const place = make("td");
    place.append(button);
    return place;
  }
  function side(list, column) {
    const box = make("div", undefined, "side"), grid = make("table"), head = make("thead"), body = make("tbody"), titles = make("tr");
    titles.append(make("th", " "));
    head.append(titles);
    list.forEach((i, row) => {
      const line = make("tr"), block = data.blocks[i];
      line.append(named("th", block.layer === null ? block.role : block.name), cell(i, row, column));
      body.append(line);
    });
    grid.append(...(layers.length ? [head] : []), body);
    box.append(grid);
    return list.length ? [box] : [];
  }
  function middle() {
    if (!layers.length) return [];
    const box = make("div", undefined, "layers"), grid = make("table"), head = make("thead"), body = make("tbody"), titles = make("tr");
    const plain = layers.every((layer) => /^h\.\d+$/.test(layer));
    titles.append(make("th"), ...layers.map((layer) => named("th", plain ? layer.slice(2) : layer)));
    head.append(titles);
    roles.forEach((role, row) => {
      const line = make("tr");
      line.append(named("th", role));
      layers.forEach((layer, column) => {
        const i = where.get(JSON.stringify([layer, role]));
        line.append(i === undefined ? make("td") : cell(i, row, column));
      });
      body.append(line);
    });
    grid.append(head, body);
    box.append(grid);
    box.classList.toggle("many", layers.length > MANY);
    if (layers.length > MANY) grid.style.minWidth = `${90 + 16 * layers.length}px`;
    return [box];
  }

  // Arrow keys go to the nearest cell in their direction.
  const arrows = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  map.addEventListener("keydown", (event) => {
    const from = [...cells].find(([, button]) => button === event.target);
    if (event.key === "Escape" && opened !== null) open(opened);
    if (!from || !arrows[event.key]) return;
    event.preventDefault();
    const [down, right] = arrows[event.key], [row, column] = places.get(from[0]);
    let best = null, least = Infinity;
    places.forEach(([r, c], i) => {
      const along = (r - row) * down + (c - column) * right, across = Math.abs(down ? c - column : r - row);
      const far = down && across ? Infinity : along + across / 1000;
      if (along > 0 && far < least) [best, least] = [i, far];
    });
    if (best !== null) cells.get(best).focus();
  });

  function filled(line, block) {
    return line.replace('"{}"', () => JSON.stringify(block.name)).replace("{size}", String(block.size));
  }
  function python(block, quantity = chosen.quantity) {
    const line = data.lines[`${chosen.letter} ${quantity}`];
    return line ? filled(line, block) : "";
  }
  // The share of a cell in the sum of all: traces add up, squares of norms do.
  function shares(now) {
    const power = { trace: 1, norm: 2 }[chosen.quantity];
    if (!power || now.some((c) => !c || c[0] < 0)) return () => "";
    const all = now.reduce((sum, c) => sum + c[0] ** power, 0);
    return (c) => (all > 0 ? `${+((100 * c[0] ** power) / all).toPrecision(2)} % of all blocks` : "");
  }
  function paint() {
    const { letter, quantity } = chosen;
    const now = table(letter, quantity) || data.blocks.map(() => null), colour = colours(quantity), share = shares(now);
    const largest = now.filter(Boolean).reduce((most, c) => Math.max(most, Math.abs(c[0])), 1e-300);
    cells.forEach((button, i) => {
      const found = now[i], name = data.blocks[i].name;
      button.className = "cell" + (button.classList.contains("out") ? " out" : "");
      button.style.backgroundColor = "";
      if (!found) button.classList.add("missing");
      else if (data.differences && !found[4]) button.classList.add("within");
      else {
        button.style.backgroundColor = colour.of(found[0]);
        const error = found[3] || data.differences ? 0 : (found[1] ?? 0) / Math.max(Math.abs(found[0]), 0.01 * largest);
        if (error > 0.5) button.classList.add("guess");
        else if (error > 0.25) button.classList.add("unsure");
      }
      const text = `${name}: ${data.quantities[quantity][0]} of ${letter} ${said(found)}`;
      const more = found ? [share(found), found[2] ? `${found[2]} samples` : "", python(data.blocks[i])] : [];
      button.title = [text, ...more].filter(Boolean).join("\n");
      button.setAttribute("aria-label", text);
      button.setAttribute("aria-pressed", String(i === opened));
    });
    for (const [box, name] of [[letters, "letter"], [quantities, "quantity"]])
      for (const button of box.children) {
        button.setAttribute("aria-pressed", String(button.dataset.value === chosen[name]));
        const there = name === "letter" ? table(button.dataset.value, quantity) : known.some((l) => table(l, button.dataset.value));
        button.disabled = !there;
        button.title = there ? "" : "not measured";
      }
    const counted = now.filter(Boolean).length, clear = now.filter((c) => c && c[4]).length;
    const count = data.differences ? `${clear} of ${counted} cells that were compared changed by more than 2 σ` : `${counted} of ${now.length} cells measured`;
    words.textContent = `${data.operators[letter]}: ${data.quantities[quantity][0]}, ${data.quantities[quantity][1]}. ${count}.`;
    explain(colour);
  }
  function explain(colour) {
    const scale = make("span", undefined, "scale"), ramp = make("span", undefined, "ramp"), marks = make("span", undefined, "marks");
    for (let k = 0; k <= 40; k++) {
      const step = make("i");
      step.style.backgroundColor = mixed(colour.ramp, k / 40);
      ramp.append(step);
    }
    const states = data.differences ? [["within 2 σ", "within"], ["not compared", "missing"]] : [["error above 50 %", "guess"], ["error 25 to 50 %", "unsure"], ["not measured", "missing"]];
    const { low, high } = colour;
    const ends = colour.signed ? [short(-high, 2), `± ${short(low, 2)}`, short(high, 2)] : [short(low, 2), short(Math.sqrt(low * high), 2), short(high, 2)];
    marks.append(...ends.map((text) => make("span", text)));
    if (!(data.differences && high <= 1e-300)) scale.append(ramp, marks);
    const keys = states.map(([text, cls]) => {
      const key = make("span", undefined, "key");
      key.append(make("span", undefined, "cell " + cls), make("span", text));
      return key;
    });
    const how = data.differences ? "Colours are on a logarithm on both sides of 0." : "Logarithmic, one scale for H, G and F. Errors are relative to the cell, or to 1 % of the largest cell.";
    legend.replaceChildren(scale, ...keys, make("span", how));
  }

  function open(i, quiet) {
    opened = opened === i && !quiet ? null : i;
    drawer.replaceChildren();
    if (opened !== null) {
      const block = data.blocks[i];
      drawer.append(make("h3", `${block.name}, ${block.size.toLocaleString("en")} parameters`));
      const grid = make("table"), head = make("tr");
      head.append(make("th", ""), ...known.map((l) => make("th", l, "number")));
      grid.append(head);
      for (const [quantity, [title]] of Object.entries(data.quantities)) {
        if (!known.some((l) => table(l, quantity))) continue;
        const row = make("tr");
        row.append(make("th", title));
        for (const letter of known) row.append(make("td", table(letter, quantity) ? said(table(letter, quantity)[i]) : "", "number"));
        grid.append(row);
      }
      block.more.forEach(([label, value]) => {
        const row = make("tr"), cell = make("td"), inside = make("div", value, "long");
        cell.append(inside);
        cell.colSpan = known.length || 1;
        row.append(make("th", label), cell);
        grid.append(row);
      });
      const numbers = make("div", undefined, "part"), parts = make("div", undefined, "parts");
      // The line of each number of this operator; that of the chosen quantity first.
      const there = Object.keys(data.quantities).filter((quantity) => table(chosen.letter, quantity) && python(block, quantity));
      const lines = make("div", undefined, "lines");
      for (const quantity of there.sort((a, b) => (b === chosen.quantity) - (a === chosen.quantity))) {
        const line = make("p");
        line.append(make("span", `${data.quantities[quantity][0]} of ${chosen.letter}: `, "faint"), make("code", python(block, quantity)));
        lines.append(line);
      }
      numbers.append(grid);
      parts.append(numbers, ...block.parts.map((part) => window.curvlens.drawerPart(part, data.shared, short, (line) => filled(line, block))));
      drawer.append(parts);
      if (there.length) drawer.append(make("h4", "In Python"), lines);
    }
    if (!quiet) window.curvlens.goTo(opened === null ? "" : data.blocks[i].name);
    paint();
  }

  for (const [box, name, values] of [[letters, "letter", Object.keys(data.operators)], [quantities, "quantity", Object.keys(data.quantities)]])
    for (const value of values) {
      const button = make("button", name === "letter" ? value : data.quantities[value][0]);
      button.type = "button";
      button.dataset.value = value;
      button.addEventListener("click", () => {
        chosen[name] = value;
        if (!table(chosen.letter, chosen.quantity)) chosen.letter = known.find((l) => table(l, chosen.quantity)) ?? chosen.letter;
        if (opened !== null) open(opened, true);
        paint();
      });
      box.append(button);
    }
  map.replaceChildren(...side(sides[0], -1), ...middle(), ...side(sides[1], layers.length));
  paint();
  document.addEventListener("page:filter", (event) => {
    cells.forEach((button, i) => {
      const text = data.blocks[i].name.toLowerCase();
      button.classList.toggle("out", !event.detail.words.every((word) => text.includes(word)));
    });
  });
  // "#h.3.attn.q" opens the drawer of that block.
  function deep() {
    const name = window.curvlens.place();
    const i = data.blocks.findIndex((b) => b.name === name);
    if (i >= 0) {
      open(i, true);
      root.scrollIntoView();
      cells.get(i).focus({ preventScroll: true });
    }
  }
  addEventListener("hashchange", deep);
  deep();
}
document.querySelectorAll("[data-heat]").forEach((root) => heat(root, window.curvlens.data.heats[root.dataset.heat]));
