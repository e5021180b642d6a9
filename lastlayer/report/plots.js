// First part of the page's script: text and shapes. `page.py` puts all parts into one function.
// Every text of the data becomes a text node: nothing in it is ever read as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs, names = data.names, many = runs.length > 1;
const byId = (id) => document.getElementById(id);
let chosen = many ? +byId("run").value : 0;

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
function draw(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "paint") paint(node, value); else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
function paint(node, {fill, stroke}) {
  if (fill !== undefined) node.style.fill = `var(--s${fill % 8})`;
  if (stroke !== undefined) node.style.stroke = `var(--s${stroke % 8})`;
}
const percent = (value, digits = 1) => value === null || value === undefined ? "–" : (100 * value).toFixed(digits);
const count = (value) => value === null || value === undefined ? "–" : value.toLocaleString("en");
const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(100 * value).toFixed(1);
const title = (metric) => data.titles[metric] || metric;
// A long name keeps both ends: names that begin alike differ at the end.
const shorten = (text, most) => {
  const letters = [...text], kept = Math.max(2, Math.floor(most) - 1);
  return letters.length > kept + 1 ? letters.slice(0, Math.ceil(kept / 2)).join("") + "…" + letters.slice(-Math.floor(kept / 2)).join("") : text;
};

// ---- theme
function theme() {
  const root = document.documentElement, buttons = [...document.querySelectorAll("#theme input")];
  const now = root.dataset.theme || "system";
  for (const button of buttons) {
    button.checked = button.value === now;
    button.addEventListener("change", () => {
      if (button.value === "system") delete root.dataset.theme; else root.dataset.theme = button.value;
      try { localStorage.setItem("lastlayer-theme", button.value); } catch (error) { /* storage is off */ }
    });
  }
}

// ---- plots: drawn at the width they have, so that text keeps its size
const tip = byId("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(6, y - box.height - 12) : y + 18}px`;
}
const hideTip = () => { tip.hidden = true; };

const watched = new WeakMap();
const observer = new ResizeObserver((entries) => {
  for (const {target, contentRect} of entries) {
    const plot = watched.get(target);
    if (!plot || contentRect.width < 100 || Math.abs(plot.width - contentRect.width) <= 1) continue; // narrow: taken out
    plot.width = contentRect.width;
    plot.redraw();
  }
});
function plot(figure, render) {
  const slot = figure.querySelector(".slot") || figure.appendChild(make("div", {class: "slot"}));
  const state = {width: slot.clientWidth || 340, redraw: () => {
    const focused = slot.contains(document.activeElement);
    slot.replaceChildren(render(state.width));
    if (focused) slot.firstElementChild.focus();
  }};
  watched.set(slot, state);
  state.redraw();
  observer.observe(slot);
  return state;
}

const SHAPES = [
  (x, y, r) => draw("circle", {cx: x, cy: y, r}),
  (x, y, r) => draw("rect", {x: x - r * 0.9, y: y - r * 0.9, width: r * 1.8, height: r * 1.8}),
  (x, y, r) => draw("path", {d: `M${x} ${y - r * 1.2}L${x + r * 1.15} ${y + r * 0.9}H${x - r * 1.15}Z`}),
  (x, y, r) => draw("path", {d: `M${x} ${y - r * 1.3}L${x + r * 1.3} ${y}L${x} ${y + r * 1.3}L${x - r * 1.3} ${y}Z`}),
];
function marker(x, y, r, series) {
  const node = SHAPES[series % SHAPES.length](x, y, r);
  paint(node, {fill: series});
  return node;
}
// A legend whose entries switch their part of the plot off and on; `off` holds the names that are off.
function keys(items, off, redraw) {
  return make("ul", {class: "keys"}, ...items.map(({name, icon}) => {
    const button = make("button", {type: "button", "aria-pressed": String(!off.has(name)), title: "show or hide", onclick: () => {
      if (!off.delete(name)) off.add(name);
      button.setAttribute("aria-pressed", String(!off.has(name)));
      redraw();
    }}, icon, name);
    return make("li", {}, button);
  }));
}
function lineIcon(one) {
  const icon = draw("svg", {viewBox: "0 0 22 12", class: "plot", "aria-hidden": "true"});
  const line = draw("line", {x1: 0, x2: 22, y1: 6, y2: 6, class: one.limit ? "limit" : one.dash ? "line dash" : "line"});
  if (!one.limit) paint(line, {stroke: one.color});
  icon.append(line);
  if (!one.limit && !one.bare) icon.append(marker(11, 6, 4, one.color));
  return icon;
}
function ticks(low, high, most) {
  const raw = (high - low) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999) || power * 10;
  const out = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-6; at++) out.push(at === 0 ? 0 : at * step);
  return out;
}

// series: {name, color, points: [{x, y, low, high, r, text}], dash, limit, bare}
function lines(figure, {series: every, xName, yName, x, y, format, whole, label}) {
  const all = every.flatMap((one) => one.points.filter((p) => p.y !== null));
  if (!all.length) { figure.append(make("p", {class: "how"}, "Nothing was stored for this plot.")); return; }
  const xs = all.map((p) => p.x), ys = all.flatMap((p) => [p.y, p.low ?? p.y, p.high ?? p.y]);
  let [x0, x1] = x || [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = y || [Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 0.1; y1 += Math.abs(y1) * 0.1 || 0.1; }
  const show = format || ((v, digits) => percent(v, digits));
  figure.querySelector(".keys")?.remove();
  const hidden = new Set();
  if (every.length > 1) figure.append(keys(every.map((one) => ({name: one.name, icon: lineIcon(one)})), hidden, () => drawn.redraw()));
  const drawn = plot(figure, (width) => {
    const series = every.filter((one) => !hidden.has(one.name));
    const height = Math.max(220, Math.min(320, width * 0.62)), left = 44, right = 14, top = 26, bottom = 40;
    const sx = (v) => left + (v - x0) / (x1 - x0) * (width - left - right);
    const sy = (v) => height - bottom - (v - y0) / (y1 - y0) * (height - top - bottom);
    const svg = draw("svg", {class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": label});
    const levels = ticks(y0, y1, 5), fine = levels.length > 1 && levels[1] - levels[0] < 0.0099 ? 1 : 0;
    for (const v of levels) {
      svg.append(draw("line", {class: "rule", x1: left, x2: width - right, y1: sy(v), y2: sy(v)}));
      svg.append(draw("text", {x: left - 7, y: sy(v) + 4, "text-anchor": "end"}, show(v, fine)));
    }
    const marks = ticks(x0, x1, Math.min(8, width / 60)).filter((v) => !whole || Number.isInteger(v));
    if (whole && x0 === 1 && !marks.includes(1)) marks.unshift(1);
    for (const v of marks) svg.append(draw("text", {x: sx(v), y: height - bottom + 18, "text-anchor": "middle"}, String(+v.toFixed(4))));
    svg.append(draw("line", {class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom}));
    svg.append(draw("text", {x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle"}, xName));
    svg.append(draw("text", {x: 0, y: 11}, yName));
    for (const one of series) {
      const points = one.points.filter((p) => p.y !== null);
      const banded = points.filter((p) => p.low !== undefined);
      if (banded.length > 1) {
        const edge = banded.map((p) => `${sx(p.x)} ${sy(p.high)}`).concat(banded.slice().reverse().map((p) => `${sx(p.x)} ${sy(p.low)}`));
        svg.append(draw("path", {class: "band", d: `M${edge.join("L")}Z`, paint: {fill: one.color}}));
      }
    }
    for (const one of series) {
      const points = one.points.filter((p) => p.y !== null);
      const path = draw("path", {class: one.limit ? "limit" : one.dash ? "line dash" : "line", d: points.length ? `M${points.map((p) => `${sx(p.x)} ${sy(p.y)}`).join("L")}` : ""});
      if (!one.limit) paint(path, {stroke: one.color});
      svg.append(path);
      if (!one.limit && !one.bare) for (const p of points) svg.append(marker(sx(p.x), sy(p.y), p.r || (points.length > 30 || series.length > 5 ? 2.2 : 3.2), one.color));
    }
    const cross = draw("line", {class: "cross", y1: top, y2: height - bottom, visibility: "hidden"});
    svg.append(cross);
    const places = [...new Set(xs)].sort((a, b) => a - b);
    let at = -1;
    const point = (i, clientX, clientY) => {
      at = Math.max(0, Math.min(places.length - 1, i));
      const v = places[at], box = svg.getBoundingClientRect();
      cross.setAttribute("x1", sx(v)); cross.setAttribute("x2", sx(v)); cross.setAttribute("visibility", "visible");
      const rows = series.map((one) => [one, one.points.find((p) => p.x === v && p.y !== null)]).filter(([, p]) => p);
      showTip([`${xName} ${+v.toFixed(3)}`, ...rows.map(([one, p]) => `${one.name}: ${p.text || show(p.y)}${p.low !== undefined ? ` (${show(p.low)} to ${show(p.high)})` : ""}`)].join("\n"),
        clientX ?? box.left + sx(v), clientY ?? box.top + top);
    };
    const off = () => { cross.setAttribute("visibility", "hidden"); hideTip(); };
    svg.addEventListener("pointermove", (event) => {
      const near = x0 + (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right) * (x1 - x0);
      point(places.reduce((best, v, i) => Math.abs(v - near) < Math.abs(places[best] - near) ? i : best, 0), event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", off);
    svg.addEventListener("blur", off);
    svg.addEventListener("keydown", (event) => {
      const move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (move) { event.preventDefault(); point(at + move); } else if (event.key === "Escape") off();
    });
    return svg;
  });
  figure.querySelector("details")?.remove();
  figure.append(figuresTable(every, xName, show));
}
function figuresTable(series, xName, show) {
  const places = [...new Set(series.flatMap((one) => one.points.map((p) => p.x)))].sort((a, b) => a - b);
  const details = make("details", {}, make("summary", {}, "Show the numbers"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    details.append(make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Numbers of the plot"}, make("table", {},
      make("thead", {}, make("tr", {}, make("th", {scope: "col"}, xName), ...series.map((one) => make("th", {scope: "col"}, one.name)))),
      make("tbody", {}, ...places.map((v) => make("tr", {}, make("th", {scope: "row"}, String(+v.toFixed(3))),
        ...series.map((one) => make("td", {}, ((p) => p && p.y !== null ? p.text || show(p.y) : "–")(one.points.find((q) => q.x === v))))))))), csvOf(details, "numbers"));
  });
  return details;
}

// ---- tables as files: numbers as they are shown, or in full where the caller has them
function csv(rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+@\t\r]|^-(?![\d.])/.test(value) ? `'${value}` : value; // a name is never a formula of a spreadsheet
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}
function csvButton(name, rows) {
  return make("button", {type: "button", class: "save", onclick: () => {
    const link = make("a", {download: `${name}.csv`, href: URL.createObjectURL(new Blob(["\ufeff", csv(rows())], {type: "text/csv"}))});
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }}, "Save as CSV");
}
// The button of a table that stands in a node; what it saves are the cells' own texts.
function csvOf(node, name) {
  const text = (cell) => [...cell.childNodes].filter((part) => !part.classList?.contains("what")).map((part) => part.textContent.trim()).filter(Boolean).join(" ").replace(/\s+/g, " ");
  return csvButton(name, () => [...node.querySelectorAll("tr")].map((row) => [...row.children].map(text)));
}
