// The frame of a page: theme, deep links, contents, filter, tables. Texts go in by textContent only.
const root = document.documentElement;
const data = JSON.parse(document.getElementById("data").textContent);
const followers = [];
// What the scripts of contents may use. `page:filter` is an event of the document for those that filter by themselves.
window.curvlens = { data, dark, place, goTo, onTheme: (act) => followers.push(act) };

function make(kind, text, attributes = {}) {
  const element = document.createElement(kind);
  if (text) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// The theme: the system's until it is chosen. It is kept in the address, as "#place;theme=dark", and nowhere else.
const system = matchMedia("(prefers-color-scheme: dark)");
function dark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
}
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // "%" and no code: not an address of ours
  }
}
function place() {
  return decoded(location.hash.slice(1).split(";theme=")[0]);
}
// Change the address, and nothing else.
function goTo(target, theme = root.dataset.theme) {
  history.replaceState(null, "", `#${encodeURIComponent(target)}${theme ? `;theme=${theme}` : ""}`);
}
function setTheme(theme) {
  if (theme) root.dataset.theme = theme;
  toggle.textContent = dark() ? "Light" : "Dark";
  toggle.setAttribute("aria-label", `${dark() ? "light" : "dark"} colours`);
  followers.forEach((act) => act());
}
const toggle = make("button", "", { type: "button" });
toggle.addEventListener("click", () => {
  const theme = dark() ? "light" : "dark";
  goTo(place(), theme);
  setTheme(theme);
});
system.addEventListener("change", () => setTheme());
const json = make("button", "Copy JSON", { type: "button", title: "All data of this page" });
json.addEventListener("click", () => copy(document.getElementById("data").textContent, json));
document.getElementById("tools").append(json, toggle);

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1200);
}

// A link opens all folds that its target is in.
function follow() {
  const theme = /;theme=(light|dark)$/.exec(location.hash);
  if (theme) setTheme(theme[1]);
  const target = place() && document.getElementById(place());
  if (!target) return;
  for (let fold = target; fold; fold = fold.parentElement) if (fold.tagName === "DETAILS") fold.open = true;
  if (target.tagName === "SECTION") target.querySelectorAll(":scope > details").forEach((fold) => (fold.open = true));
  target.scrollIntoView();
  (target.tagName === "DETAILS" ? target.querySelector("summary") : target).focus({ preventScroll: true });
}
addEventListener("hashchange", follow);
// Also where the address has the place already.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.('a[href^="#"]');
  if (link && decoded(link.hash.slice(1)) === place()) follow();
});

// The contents mark the section that is being read.
const links = new Map();
for (const link of document.querySelectorAll("#contents a")) links.set(decoded(link.hash.slice(1)), link);
if (links.size) {
  const seen = new Set();
  const watch = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) seen[entry.isIntersecting ? "add" : "delete"](entry.target.id);
      const first = [...links.keys()].find((id) => seen.has(id));
      if (first === undefined) return;
      links.forEach((link) => link.removeAttribute("aria-current"));
      links.get(first).setAttribute("aria-current", "true");
    },
    { rootMargin: "-10% 0px -55% 0px" },
  );
  for (const id of links.keys()) watch.observe(document.getElementById(id));
}

// The filter hides rows of tables and items of lists that do not have all its words.
const filter = document.getElementById("filter");
if (filter) {
  const input = make("input", "", { type: "search", placeholder: `Filter ${filter.dataset.what}` });
  input.setAttribute("aria-label", `filter ${filter.dataset.what}`);
  const told = make("output");
  filter.append(input, told);
  const items = [...document.querySelectorAll("details.item, .table:not(.kept) tbody tr")];
  const texts = items.map((item) => item.textContent.toLowerCase());
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    items.forEach((item, i) => {
      item.hidden = !words.every((word) => texts[i].includes(word));
      shown += !item.hidden;
    });
    // Hits are shown, not kept behind a fold.
    if (words.length)
      for (const fold of new Set(items.filter((item) => !item.hidden).map((item) => item.closest("section > details"))))
        if (fold) fold.open = true;
    told.textContent = words.length ? `${shown} of ${items.length}` : "";
    document.dispatchEvent(new CustomEvent("page:filter", { detail: { words } }));
  });
  addEventListener("keydown", (event) => {
    if (event.key === "/" && !/INPUT|TEXTAREA/.test(document.activeElement.tagName)) {
      event.preventDefault();
      input.focus();
    }
  });
}

// Tables: sorted by a heading, copied as CSV. A cell is its exact value where it has one.
const exact = (cell) => cell.dataset.value ?? cell.textContent.trim();
function order(a, b) {
  const [x, y] = [exact(a), exact(b)];
  if (!x || !y) return x ? -1 : y ? 1 : 0; // what is not known comes last
  const [m, n] = [x, y].map((text) => parseFloat(text.replace("−", "-")));
  return Number.isFinite(m) && Number.isFinite(n) ? m - n : x.localeCompare(y, undefined, { numeric: true });
}
const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
for (const box of document.querySelectorAll(".table")) {
  const heads = [...box.querySelectorAll("thead tr:last-child th")];
  const body = box.querySelector("tbody");
  const before = [...body.rows];
  heads.forEach((head, i) => {
    const button = make("button", head.textContent, { type: "button", title: "Sort" });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      // A column of numbers begins with the largest; the third click brings the first order back.
      const ways = head.classList.contains("number") ? ["descending", "ascending"] : ["ascending", "descending"];
      const way = [...ways, null][(ways.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      const rows = [...before];
      if (way) {
        head.setAttribute("aria-sort", way);
        const empty = (row) => !exact(row.cells[i]);
        rows.sort((a, b) => empty(a) - empty(b) || (way === "ascending" ? 1 : -1) * order(a.cells[i], b.cells[i]));
      }
      body.append(...rows);
    });
  });
  const button = make("button", "Copy CSV", { type: "button", class: "copy" });
  button.addEventListener("click", () => {
    const titles = heads.map((head) => [head.dataset.group, head.textContent].filter(Boolean).join(" "));
    const rows = [...body.rows].filter((row) => !row.hidden).map((row) => [...row.cells].map(exact));
    copy([titles, ...rows].map((row) => row.map(quoted).join(",")).join("\n") + "\n", button);
  });
  box.prepend(button);
}

// Printed with all folds open.
const folded = [];
addEventListener("beforeprint", () => {
  folded.push(...document.querySelectorAll("details:not([open])"));
  folded.forEach((fold) => (fold.open = true));
});
addEventListener("afterprint", () => folded.splice(0).forEach((fold) => (fold.open = false)));

setTheme();
follow();
