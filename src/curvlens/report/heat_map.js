// A heat map of blocks: layers as columns, roles as rows. Texts go in by textContent only: names are hostile.
function heat(root, data) {
  const [letters, quantities, words, map, legend, drawer] = [
    ".letters", ".quantities", ".words", ".map", ".legend", ".drawer",
  ].map((name) => root.querySelector(name));
  const VIRIDIS = ["#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
  const SIGNED = ["#b35806", "#e08214", "#fdb863", "#fee0b6", "#f0f0f0", "#c6dbef", "#6baed6", "#2171b5", "#08306b"];
  const chosen = { letter: Object.keys(data.cells).includes("G") ? "G" : "H", quantity: "trace" };
  let opened = null;

  function make(kind, text, cls) {
    const element = document.createElement(kind);
    if (text !== undefined) element.textContent = text;
    if (cls) element.className = cls;
    return element;
  }
  function short(x) {
    if (x === null || x === undefined) return "";
    if (x !== 0 && (Math.abs(x) >= 1e4 || Math.abs(x) < 1e-3)) return x.toExponential(2).replace("e+", "e").replace("-", "−");
    return String(+x.toPrecision(3)).replace("-", "−");
  }
  function said(cell) {
    if (!cell) return data.differences ? "not compared" : "not measured";
    const sign = data.differences && cell[0] > 0 ? "+" : "";
    if (cell[5]) return sign + short(cell[0]) + " (exact)";
    return sign + short(cell[0]) + (cell[1] ? " ± " + (+cell[1].toPrecision(2) >= 1e4 ? short(cell[1]) : short(+cell[1].toPrecision(2))) : "");
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
    const coloured = (c) => c && (!data.differences || c[7]);
    const all = Object.keys(data.cells).flatMap((letter) => table(letter, quantity) || []).filter(coloured).map((c) => c[0]);
    const sizes = all.map(Math.abs).filter((x) => x > 0);
    const high = Math.max(...sizes, 1e-300), low = Math.max(Math.min(...sizes, high), high * (data.differences ? 1e-3 : 1e-6));
    // Colours of both signs only where the operator has both; sizes are on the same scale either way.
    const signed = data.differences || (table(chosen.letter, quantity) || []).some((c) => c && c[0] < 0);
    const span = Math.log10(high / low) || 1;
    const size = (x) => Math.min(Math.max(Math.log10(Math.max(Math.abs(x), low) / low) / span, 0), 1);
    const of = (x) => (signed ? mixed(SIGNED, 0.5 + (Math.sign(x) * (0.1 + 0.9 * size(x))) / 2) : mixed(VIRIDIS, size(x)));
    return { of, low, high, signed, ramp: signed ? SIGNED : VIRIDIS };
  }

  const layers = [...new Set(data.blocks.map((b) => b.layer).filter((x) => x !== null))];
  const inside = [...new Set(data.blocks.filter((b) => b.layer !== null).map((b) => b.role))];
  const outside = data.blocks.map((b, i) => i).filter((i) => data.blocks[i].layer === null);
  const where = new Map(data.blocks.map((b, i) => [b.layer + " " + b.role, i]));
  const cells = new Map();

  function cell(i) {
    const button = make("button", undefined, "cell");
    button.type = "button";
    button.addEventListener("click", () => open(i));
    cells.set(i, button);
    return button;
  }
  function lay() {
    const grid = make("table"), head = make("thead"), body = make("tbody"), titles = make("tr");
    titles.append(make("th"));
    layers.forEach((layer) => titles.append(make("th", layer.replace(/^.*?(\d+)$/, layers.every((l) => /^h\.\d+$/.test(l)) ? "$1" : "$&"))));
    if (outside.length && layers.length) titles.append(make("td", undefined, "gap"), make("th"), make("th"));
    head.append(titles);
    const rows = layers.length ? Math.max(inside.length, outside.length) : outside.length;
    for (let r = 0; r < rows; r++) {
      const row = make("tr");
      if (layers.length) {
        row.append(make("th", inside[r] ?? ""));
        for (const layer of layers) {
          const place = make("td"), i = where.get(layer + " " + inside[r]);
          if (inside[r] !== undefined && i !== undefined) place.append(cell(i));
          row.append(place);
        }
      }
      if (outside.length) {
        if (layers.length) row.append(make("td", undefined, "gap"));
        row.append(make("th", outside[r] === undefined ? "" : data.blocks[outside[r]].role));
        const place = make("td");
        if (outside[r] !== undefined) place.append(cell(outside[r]));
        row.append(place);
      }
      body.append(row);
    }
    grid.append(head, body);
    map.replaceChildren(grid);
  }

  function paint() {
    const { letter, quantity } = chosen;
    const now = table(letter, quantity) || data.blocks.map(() => null), colour = colours(quantity);
    const largest = Math.max(...now.filter(Boolean).map((c) => Math.abs(c[0])), 1e-300);
    cells.forEach((button, i) => {
      const found = now[i], name = data.blocks[i].name;
      button.className = "cell" + (button.classList.contains("out") ? " out" : "");
      button.style.backgroundColor = "";
      if (!found) button.classList.add("missing");
      else if (data.differences && !found[7]) button.classList.add("within");
      else {
        button.style.backgroundColor = colour.of(found[0]);
        const error = found[5] || data.differences ? 0 : (found[1] ?? 0) / Math.max(Math.abs(found[0]), 0.01 * largest);
        if (error > 0.5) button.classList.add("guess");
        else if (error > 0.25) button.classList.add("unsure");
      }
      const text = `${name}: ${data.quantities[quantity][0]} of ${letter} ${said(found)}`;
      button.title = text + (found && found[4] ? `, ${found[4]} samples` : "");
      button.setAttribute("aria-label", text);
      button.setAttribute("aria-pressed", String(i === opened));
    });
    for (const [box, name] of [[letters, "letter"], [quantities, "quantity"]])
      for (const button of box.children) {
        button.setAttribute("aria-pressed", String(button.dataset.value === chosen[name]));
        const there = name === "letter" ? table(button.dataset.value, quantity) : Object.keys(data.cells).some((l) => table(l, button.dataset.value));
        button.disabled = !there;
      }
    const counted = now.filter(Boolean).length, clear = now.filter((c) => c && c[7]).length;
    const count = data.differences ? `${clear} of ${counted} cells that were compared changed by more than 2 σ` : `${counted} of ${now.length} cells measured`;
    words.textContent = `${data.operators[letter]}: ${data.quantities[quantity][0]}, ${data.quantities[quantity][1]}. ${count}.`;
    const scale = make("span", undefined, "scale"), ramp = make("span");
    for (const colourOfStep of colour.ramp) {
      const step = make("i");
      step.style.backgroundColor = colourOfStep;
      ramp.append(step);
    }
    const states = data.differences ? [["within 2 σ", "within"], ["not compared", "missing"]] : [["error above 50 %", "guess"], ["25 to 50 %", "unsure"], ["not measured", "missing"]];
    if (!(data.differences && colour.high <= 1e-300))
      scale.append(make("span", colour.signed ? short(-colour.high) : short(colour.low)), ramp, make("span", short(colour.high)));
    const keys = states.map(([text, cls]) => {
      const key = make("span", undefined, "key");
      key.append(make("span", undefined, "cell " + cls), make("span", text));
      return key;
    });
    const note = data.differences ? "Colours are on a logarithm on both sides of 0." : "Errors are relative to the cell, or to 1 % of the largest cell.";
    legend.replaceChildren(scale, ...keys, make("span", note));
  }

  function open(i, quiet) {
    opened = opened === i && !quiet ? null : i;
    drawer.replaceChildren();
    if (opened !== null) {
      const block = data.blocks[i];
      drawer.append(make("h3", `${block.name}, ${block.size.toLocaleString("en")} parameters`));
      const grid = make("table"), head = make("tr");
      head.append(make("th", ""), ...Object.keys(data.cells).map((l) => make("th", l)));
      grid.append(head);
      for (const [quantity, [title]] of Object.entries(data.quantities)) {
        if (!Object.keys(data.cells).some((l) => table(l, quantity))) continue;
        const row = make("tr");
        row.append(make("th", title));
        for (const letter of Object.keys(data.cells)) row.append(make("td", table(letter, quantity) ? said(table(letter, quantity)[i]) : "", "number"));
        grid.append(row);
      }
      block.more.forEach(([label, value]) => {
        const row = make("tr"), cell = make("td", value);
        cell.colSpan = 3;
        row.append(make("th", label), cell);
        grid.append(row);
      });
      drawer.append(grid);
      const line = data.lines[`${chosen.letter} ${chosen.quantity}`];
      if (line) {
        const said = make("p");
        said.append(make("span", "In Python: ", "faint"), make("code", line.replace("{}", block.name)));
        drawer.append(said);
      }
      if (!quiet) history.replaceState(null, "", "#" + encodeURIComponent(block.name));
    }
    paint();
  }

  for (const [box, name, values] of [[letters, "letter", Object.keys(data.operators)], [quantities, "quantity", Object.keys(data.quantities)]])
    for (const value of values) {
      const button = make("button", name === "letter" ? value : data.quantities[value][0]);
      button.type = "button";
      button.dataset.value = value;
      button.addEventListener("click", () => {
        chosen[name] = value;
        if (!table(chosen.letter, chosen.quantity)) chosen.letter = Object.keys(data.cells).find((l) => table(l, chosen.quantity)) ?? chosen.letter;
        paint();
      });
      box.append(button);
    }
  lay();
  paint();
  document.addEventListener("page:filter", (event) => {
    cells.forEach((button, i) => {
      const text = data.blocks[i].name.toLowerCase();
      button.classList.toggle("out", !event.detail.words.every((word) => text.includes(word)));
    });
  });
  // "#h.3.attn.q" opens the drawer of that block.
  function deep() {
    const name = decodeURIComponent(location.hash.slice(1).split(";theme=")[0]);
    const i = data.blocks.findIndex((b) => b.name === name);
    if (i >= 0) {
      open(i, true);
      root.scrollIntoView();
    }
  }
  addEventListener("hashchange", deep);
  deep();
}
document.querySelectorAll("[data-heat]").forEach((root) => heat(root, window.curvlens.data.heats[root.dataset.heat]));
