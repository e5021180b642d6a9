// The playground's page: state, controls and drawings. The numbers come from maths.js.
import { METHODS, balanced, evaluate, flatten, lml, polygon, residual, weighted } from "./maths.js";

const RANGE = 5; // logits go from -RANGE to RANGE
const START = { x: [2.5, 1.5, 0.5, -0.5, -2], k: 2, temperature: 1, label: 1 };
const PRESETS = {
  "start again": () => START,
  "three classes": () => ({ x: [1.5, 0.5, -1], k: 1.5, temperature: 1, label: 1 }),
  "all equal": (now) => ({ ...now, x: now.x.map(() => 0) }),
  "a clear gap": (now) => ({ ...now, x: now.x.map((_, i) => (i < Math.round(now.k) ? 3 : -3)) }),
  random: (now) => ({ ...now, x: now.x.map(() => round(4 * (Math.random() + Math.random() - 1), 1)) }),
};

const root = document.getElementById("play");
const part = (name) => root.querySelector(`[data-part="${name}"]`);
const round = (value, digits) => Number(value.toFixed(digits));
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const name = (i) => "abcdefgh"[i];
const signed = (value, digits) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
const number = (value, digits) => (value < 0 ? "−" : "") + Math.abs(value).toFixed(digits);

let state = read(location.hash) ?? START;

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const text = (x, y, content, attributes = {}) => svg("text", { x, y, ...attributes }, content);

function drawing(width, height, label) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
}

/** An arrow along y or any direction; nothing where it is too short to see. */
function arrow(x1, y1, x2, y2, kind) {
  const length = Math.hypot(x2 - x1, y2 - y1);
  if (length < 2.5) return svg("g");
  const [ux, uy] = [(x2 - x1) / length, (y2 - y1) / length];
  const head = Math.min(6, length * 0.7);
  const [bx, by] = [x2 - ux * head, y2 - uy * head];
  const wing = head * 0.55;
  const tip = `${x2},${y2} ${bx - uy * wing},${by + ux * wing} ${bx + uy * wing},${by - ux * wing}`;
  return svg("g", { class: `arrow ${kind}` }, svg("line", { x1, y1, x2: bx, y2: by }), svg("polygon", { points: tip }));
}

// --- state ---------------------------------------------------------------------------------------------------------

function read(hash) {
  const given = new URLSearchParams(hash.slice(1));
  const x = (given.get("x") ?? "").split(",").map(Number);
  if (!given.has("x") || x.length < 3 || x.length > 8 || x.some((value) => !Number.isFinite(value))) return null;
  const pick = (key, usual) => (Number.isFinite(parseFloat(given.get(key))) ? parseFloat(given.get(key)) : usual);
  return tidy({ x, k: pick("k", 2), temperature: pick("t", 1), label: pick("label", 0) });
}

function tidy({ x, k, temperature, label }) {
  return {
    x: x.map((value) => clamp(value, -RANGE, RANGE)),
    k: clamp(k, 0, x.length),
    temperature: clamp(temperature, 0.05, 20),
    label: clamp(Math.round(label), 0, x.length - 1),
  };
}

function change(part) {
  const before = state.x.length;
  state = tidy({ ...state, ...part });
  const { x, k, temperature, label } = state;
  history.replaceState(null, "", `#x=${x.join(",")}&k=${k}&t=${temperature}&label=${label}`);
  if (x.length !== before) buildLogits();
  render();
}

// --- logits: one slider per class ----------------------------------------------------------------------------------

const SLIDER = { height: 210, top: 18, bottom: 36 };
const track = SLIDER.height - SLIDER.top - SLIDER.bottom;
const place = (value) => SLIDER.top + (track * (RANGE - value)) / (2 * RANGE);

function buildLogits() {
  const box = part("logits");
  const n = state.x.length;
  const width = Math.max(260, box.clientWidth);
  const column = width / n;
  const picture = drawing(width, SLIDER.height, "Logits, one slider per class");
  picture.setAttribute("role", "group");
  picture.append(svg("line", { class: "axis", x1: 0, x2: width, y1: place(0), y2: place(0) }));
  for (let i = 0; i < n; i++) {
    const slider = svg("g", {
      class: "slider", tabindex: 0, role: "slider", "aria-orientation": "vertical", "aria-label": `logit ${name(i)}`,
      "aria-valuemin": -RANGE, "aria-valuemax": RANGE, transform: `translate(${i * column} 0)`,
    });
    const [middle, bar] = [column / 2, Math.min(34, column * 0.5)];
    slider.append(
      svg("rect", { class: "hit", x: 0, y: 0, width: column, height: SLIDER.height - 30 }),
      svg("line", { class: "track", x1: middle, x2: middle, y1: place(RANGE), y2: place(-RANGE) }),
      svg("rect", { class: "bar", x: middle - bar / 2, width: bar, rx: 3 }),
      svg("g", { class: "pull" }),
      svg("circle", { class: "knob", cx: middle, r: 9 }),
      text(middle, 11, "", { class: "value" }),
    );
    slider.addEventListener("keydown", (event) => key(event, i));
    slider.addEventListener("pointerdown", (event) => {
      slider.setPointerCapture(event.pointerId);
      slider.focus({ preventScroll: true });
      drag(event, i);
      event.preventDefault();
    });
    slider.addEventListener("pointermove", (event) => slider.hasPointerCapture(event.pointerId) && drag(event, i));
    picture.append(slider);
  }
  const labels = document.createElement("div");
  labels.className = "labels";
  labels.setAttribute("role", "radiogroup");
  labels.setAttribute("aria-label", "The true label");
  for (let i = 0; i < n; i++) {
    const choice = document.createElement("label");
    const radio = Object.assign(document.createElement("input"), { type: "radio", name: "true-label", value: i });
    radio.addEventListener("change", () => change({ label: i }));
    choice.append(radio, document.createTextNode(name(i)));
    labels.append(choice);
  }
  box.replaceChildren(picture, labels);
}

function key(event, i) {
  const steps = { ArrowUp: 0.1, ArrowRight: 0.1, ArrowDown: -0.1, ArrowLeft: -0.1, PageUp: 1, PageDown: -1 };
  const goal = { Home: -RANGE, End: RANGE }[event.key] ?? (event.key in steps ? state.x[i] + steps[event.key] : null);
  if (goal === null) return;
  event.preventDefault();
  move(i, goal);
}

function drag(event, i) {
  const frame = part("logits").querySelector("svg").getBoundingClientRect();
  const y = ((event.clientY - frame.top) / frame.height) * SLIDER.height;
  move(i, RANGE - ((y - SLIDER.top) / track) * 2 * RANGE);
}

function move(i, value) {
  change({ x: state.x.map((old, j) => (j === i ? round(clamp(value, -RANGE, RANGE), 2) : old)) });
}

function renderLogits({ pushes }) {
  part("logits").querySelectorAll(".slider").forEach((slider, i) => {
    const value = state.x[i];
    const [at, zero] = [place(value), place(0)];
    const middle = slider.querySelector(".knob").getAttribute("cx");
    slider.setAttribute("aria-valuenow", value);
    slider.setAttribute("aria-valuetext", `${value.toFixed(2)}`);
    slider.querySelector(".knob").setAttribute("cy", at);
    const bar = slider.querySelector(".bar");
    bar.setAttribute("y", Math.min(at, zero));
    bar.setAttribute("height", Math.abs(at - zero));
    slider.querySelector(".value").textContent = number(value, 2);
    const room = 9 * Math.sign(pushes[i]);
    const length = clamp(110 * pushes[i], -60, 60);
    slider.querySelector(".pull").replaceChildren(arrow(middle, at - room, middle, at - room - length, "push"));
    slider.classList.toggle("chosen", i === state.label);
  });
  part("logits").querySelectorAll("input").forEach((radio, i) => (radio.checked = i === state.label));
}

// --- the five answers side by side ---------------------------------------------------------------------------------

function renderMethods({ y, gradients }) {
  const panels = Object.entries(METHODS).map(([key, method]) => {
    const figure = document.createElement("figure");
    figure.dataset.method = key;
    const caption = document.createElement("figcaption");
    const total = y[key].reduce((a, b) => a + b, 0);
    caption.innerHTML = `<b></b> <span>sum ${total.toFixed(3)}</span>`;
    caption.firstChild.textContent = method.name;
    figure.append(bars(key, y[key], gradients[key]), caption);
    return figure;
  });
  part("methods").replaceChildren(...panels);
}

function bars(key, y, gradient) {
  const [width, height, top, bottom] = [140, 150, 16, 32];
  const scale = height - top - bottom;
  const column = (width - 8) / y.length;
  const values = y.map((p, i) => `${name(i)} ${p.toFixed(3)}`).join(", ");
  const picture = drawing(width, height, `${METHODS[key].name}: ${values}`);
  picture.setAttribute("width", "100%");
  picture.removeAttribute("height");
  const ground = top + scale;
  picture.append(svg("line", { class: "limit", x1: 4, x2: width - 4, y1: top, y2: top }));
  picture.append(svg("line", { class: "axis", x1: 4, x2: width - 4, y1: ground, y2: ground }));
  y.forEach((p, i) => {
    const middle = 4 + (i + 0.5) * column;
    const bar = Math.min(24, column * 0.62);
    const at = ground - scale * p;
    picture.append(svg("rect", { class: "bar", x: middle - bar / 2, y: at, width: bar, height: scale * p, rx: 2 }));
    const reach = clamp(150 * gradient[i], -60, 60);
    picture.append(arrow(middle, at, middle, clamp(at - reach, 2, ground + 12), "change"));
    picture.append(text(middle, ground + 13, name(i), { class: i === state.label ? "class chosen" : "class" }));
    // Where there is no room, the table below has the numbers.
    if (y.length <= 5) picture.append(text(middle, ground + 27, p.toFixed(2), { class: "value" }));
  });
  return picture;
}

// --- one equation per row ------------------------------------------------------------------------------------------

function renderRoot({ scores, nu, iterates, bounds }) {
  const box = part("root");
  const [width, height] = [Math.max(260, box.clientWidth), 250];
  const [left, right, top, bottom] = [34, 10, 12, 34];
  const picture = drawing(width, height, "The function g of nu, its bracket and the steps of the search");
  box.replaceChildren(picture);
  const { k } = state;
  const n = scores.length;
  const middle = bounds ? (bounds[0] + bounds[1]) / 2 : 0;
  const reach = bounds ? Math.max(4, 0.9 * (bounds[1] - bounds[0])) : 8;
  const [low, high] = [middle - reach, middle + reach];
  const px = (value) => left + ((width - left - right) * (value - low)) / (high - low);
  const py = (value) => top + ((height - top - bottom) * (n - k - value)) / n;
  if (bounds) {
    const [a, b] = bounds.map(px);
    picture.append(svg("rect", { class: "bracket", x: a, y: top, width: Math.max(1, b - a), height: height - top - bottom }));
  }
  picture.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: py(0), y2: py(0) }));
  for (const value of [-k, 0, n - k]) {
    picture.append(text(left - 5, py(value) + 4, number(value, Number.isInteger(value) ? 0 : 1), { class: "tick end" }));
  }
  const step = niceStep((high - low) / (width / 70));
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) {
    picture.append(svg("line", { class: "axis", x1: px(value), x2: px(value), y1: height - bottom, y2: height - bottom + 4 }));
    picture.append(text(px(value), height - bottom + 16, number(round(value, 6), step < 1 ? 1 : 0), { class: "tick" }));
  }
  picture.append(text(width - right, height - 3, "ν", { class: "tick end" }), text(4, top + 2, "g", { class: "tick start" }));
  const count = Math.round(width / 2);
  const points = Array.from({ length: count + 1 }, (_, i) => low + ((high - low) * i) / count);
  picture.append(svg("polyline", { class: "curve", points: points.map((v) => `${px(v)},${py(residual(scores, k, v))}`).join(" ") }));
  iterates.forEach((value, i) => {
    const [x, y] = [px(value), py(residual(scores, k, value))];
    picture.append(svg("line", { class: "drop", x1: x, x2: x, y1: y, y2: py(0) }));
    picture.append(svg("circle", { class: i === iterates.length - 1 ? "found" : "step", cx: x, cy: y, r: i === iterates.length - 1 ? 5 : 3.5 }));
    const hidden = iterates.slice(0, i).some((other) => Math.abs(px(other) - x) < 12);
    if (!hidden) picture.append(text(x, y - 9, i, { class: "tick" }));
  });
  part("root-text").textContent = bounds
    ? `The bracket is ${number(bounds[0], 3)} to ${number(bounds[1], 3)}. Steps from its middle: ` +
      `${iterates.map((value) => number(value, 6)).join(", ")}. So ν = ${number(nu, 6)}.`
    : `At k = ${k === 0 ? "0 no class is in" : "n every class is in"}: ν is infinite and there is nothing to search.`;
}

function niceStep(least) {
  const unit = 10 ** Math.floor(Math.log10(least));
  return unit * [1, 2, 5, 10].find((factor) => factor * unit >= least);
}

// --- the polytope of three classes ---------------------------------------------------------------------------------

function renderPolytope({ scores, y, pushes }) {
  const box = part("polytope");
  if (scores.length !== 3) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Show three classes" });
    button.addEventListener("click", () => change({ x: state.x.slice(0, 3), k: Math.min(state.k, 2.5) }));
    const note = document.createElement("p");
    note.textContent = "With three classes the set of answers is flat, and can be drawn.";
    box.replaceChildren(note, button);
    part("polytope-text").textContent = "";
    return;
  }
  const [width, height] = [Math.max(260, Math.min(430, box.clientWidth)), 290];
  const picture = drawing(width, height, "The polytope of k labels among three, and the five answers");
  box.replaceChildren(picture);
  const scale = 145;
  const at = (point) => {
    const [u, v] = flatten(point);
    return [width / 2 + scale * u, height / 2 + 14 - scale * v];
  };
  const corners = polygon(state.k);
  const cube = [[1, 0, 0], [1, 0, 1], [0, 0, 1], [0, 1, 1], [0, 1, 0], [1, 1, 0]];
  picture.append(svg("polygon", { class: "cube", points: cube.map(at).join(" ") }));
  picture.append(svg("polygon", { class: "polygon", points: corners.map(at).join(" ") }));
  corners.forEach((corner) => {
    const [u, v] = at(corner);
    picture.append(svg("circle", { class: "corner", cx: u, cy: v, r: 2.5 }));
  });
  [[1, 0, 0], [0, 1, 0], [0, 0, 1]].forEach((axis, i) => {
    const [u, v] = at(axis.map((value) => 1.09 * value));
    picture.append(text(u, v + 4, name(i), { class: i === state.label ? "class chosen" : "class" }));
  });
  if (state.k > 0 && state.k < 3) {
    const path = Array.from({ length: 81 }, (_, i) => 10 ** (-1.7 + (3.7 * i) / 80)) // temperatures 0.02 to 100
      .map((t) => at(lml(state.x.map((value) => value / t), state.k)));
    picture.append(svg("polyline", { class: "path", points: path.join(" ") }));
    const there = lml(scores.map((value, i) => value + 0.001 * pushes[i]), state.k);
    const [[u, v], ahead] = [at(y.lml), at(y.lml.map((p, i) => p + 1500 * (there[i] - p)))];
    picture.append(arrow(u, v, ...ahead, "push"));
  }
  for (const key of Object.keys(METHODS)) {
    const total = y[key].reduce((a, b) => a + b, 0);
    const inside = Math.abs(total - state.k) < 1e-6;
    const [u, v] = at(y[key]);
    const dot = svg("circle", { class: inside ? "dot" : "dot off", cx: u, cy: v, r: key === "lml" ? 6 : 5, "data-method": key });
    dot.append(svg("title", {}, METHODS[key].name));
    picture.append(dot);
  }
  const shape = corners.length === 6 ? "a hexagon" : corners.length === 3 ? "a triangle" : "a point";
  part("polytope-text").textContent =
    `All y between 0 and 1 with sum ${round(state.k, 2)}: ${shape}, seen along (1, 1, 1). Dots have the colours above. The line is LML from cold ` +
    "(a corner or an edge) to hot (the middle). Hollow dots have another sum: they lie above or below the plane.";
}

// --- budgets of other kinds: a cost per class, and a table with rows and columns -------------------------------------

const budgets = {
  cost: [4, 1, 2, 1, 3, 1, 2, 1],
  share: 0.45, // of all costs
  matrix: [[3, 1, 0, -1], [2.5, 0.5, 0, 1], [2, 0, 1, -1], [3, 2, -1, 0]],
  k: 1,
};

function numberInput(label, value, [min, max, step], use) {
  const input = Object.assign(document.createElement("input"), { type: "number", min, max, step, value });
  input.setAttribute("aria-label", label);
  input.addEventListener("input", () => {
    if (!input.checkValidity() || input.value === "") return;
    use(Number(input.value));
    renderBudgets();
  });
  return input;
}

function cell(...children) {
  const node = document.createElement("div");
  node.className = "cell";
  const value = document.createElement("span");
  node.append(...children, value);
  node.show = (p, words = p.toFixed(3)) => {
    node.style.setProperty("--p", clamp(p, 0, 1));
    value.textContent = words;
  };
  return node;
}

function buildCosts() {
  const cells = state.x.map((_, i) => {
    const title = Object.assign(document.createElement("b"), { textContent: name(i) });
    return cell(title, numberInput(`cost ${name(i)}`, budgets.cost[i], [0, 9, 0.5], (value) => (budgets.cost[i] = value)));
  });
  part("costs").replaceChildren(...cells);
}

function buildMatrix() {
  const nodes = [];
  budgets.matrix.forEach((row, i) => {
    row.forEach((_, j) => {
      const use = (value) => (budgets.matrix[i][j] = value);
      nodes.push(cell(numberInput(`score of row ${i + 1}, column ${j + 1}`, row[j], [-9, 9, 0.5], use)));
    });
    nodes.push(Object.assign(document.createElement("div"), { className: "sum" }));
  });
  for (let j = 0; j < 5; j++) nodes.push(Object.assign(document.createElement("div"), { className: "sum" }));
  part("matrix").replaceChildren(...nodes);
}

function renderBudgets() {
  const total = (values) => values.reduce((a, b) => a + b, 0);
  if (part("costs").childElementCount !== state.x.length) buildCosts();
  const cost = budgets.cost.slice(0, state.x.length);
  const all = total(cost);
  const budget = round(budgets.share * all, 2);
  const scores = state.x.map((value) => value / state.temperature);
  const y = weighted(scores, cost, budget);
  part("budget").max = all;
  part("budget").value = budget;
  part("budget-value").textContent = number(budget, 2);
  [...part("costs").children].forEach((node, i) => node.show(y[i]));
  const spent = total(y.map((p, i) => cost[i] * p));
  const expected = number(total(y), 2);
  part("costs-text").textContent =
    `The logits above with a cost per class, which you can change: σ(x + cost · ν). The costs times the probabilities add up to ` +
    `${number(spent, 2)}, and ${expected} labels are expected. An expensive label is shifted further than a cheap one; a label ` +
    "without a cost keeps its sigmoid.";
  const rows = budgets.matrix.map((row) => lml(row, budgets.k));
  const table = balanced(budgets.matrix, budgets.k);
  const nodes = [...part("matrix").children];
  table.forEach((row, i) => {
    row.forEach((p, j) => nodes[5 * i + j].show(p));
    nodes[5 * i + 4].textContent = `Σ ${total(row).toFixed(2)}`;
  });
  const column = (values, j) => total(values.map((row) => row[j])).toFixed(2);
  for (let j = 0; j < 4; j++) nodes[20 + j].textContent = `Σ ${column(table, j)}`;
  nodes[24].textContent = "";
  part("share").value = budgets.k;
  part("share-value").textContent = number(budgets.k, 2);
  part("matrix-text").textContent =
    "The upper numbers are scores, which you can change; the lower ones are lml_balanced of them. Every row has the sum k, every " +
    "column has the same sum, and no entry is above 1. With lml, row by row, the columns would have the sums " +
    `${[0, 1, 2, 3].map((j) => column(rows, j)).join(", ")}.`;
  root.budgets = { cost, budget, weighted: y, scores, matrix: budgets.matrix, k: budgets.k, balanced: table }; // for the tests
}

part("budget").addEventListener("input", (event) => {
  const all = budgets.cost.slice(0, state.x.length).reduce((a, b) => a + b, 0);
  budgets.share = all > 0 ? Number(event.target.value) / all : 0;
  renderBudgets();
});
part("share").addEventListener("input", (event) => {
  budgets.k = Number(event.target.value);
  renderBudgets();
});

// --- numbers, controls ---------------------------------------------------------------------------------------------

function renderNumbers({ y, nu, loss }) {
  const head = ["class", "logit", ...Object.values(METHODS).map((method) => method.name)];
  const rows = state.x.map((value, i) => [name(i), number(value, 2), ...Object.keys(METHODS).map((key) => y[key][i].toFixed(6))]);
  const totals = Object.keys(METHODS).map((key) => y[key].reduce((a, b) => a + b, 0).toFixed(6));
  rows.push(["sum", "", ...totals]);
  const table = document.createElement("table");
  for (const [i, cells] of [head, ...rows].entries()) {
    const line = table.insertRow();
    cells.forEach((content, j) => {
      const cell = document.createElement(i === 0 || j === 0 ? "th" : "td");
      cell.textContent = content;
      line.append(cell);
    });
  }
  const frame = document.createElement("div");
  frame.className = "scroll";
  frame.tabIndex = 0; // it scrolls, so the keyboard must reach it
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", "Numbers");
  frame.append(table);
  part("numbers").replaceChildren(frame);
  const { x, k, temperature, label } = state;
  const row = `torch.tensor([${x.map((value) => (Number.isInteger(value) ? `${value}.0` : value)).join(", ")}])`;
  const heat = temperature === 1 ? "" : `, temperature=${temperature}`;
  part("code").textContent =
    `x = ${row}\nll.lml(x, k=${k}${heat})  # sum ${k}, nu ${nu.toFixed(4)}\n` +
    `ll.lml_loss(x[None], torch.tensor([[${label}]]), k=${k}${heat})  # ${loss.toFixed(4)}`;
}

function renderControls() {
  const { x, k, temperature } = state;
  const controls = { n: x.length, k, temperature: Math.log10(temperature) };
  part("k").max = x.length;
  for (const [key, value] of Object.entries(controls)) part(key).value = value;
  const hot = number(temperature, temperature < 10 ? 2 : 1);
  part("n-value").textContent = x.length;
  part("k-value").textContent = round(k, 2);
  part("temperature-value").textContent = hot;
  part("temperature").setAttribute("aria-valuetext", hot);
}

function render() {
  const result = evaluate(state);
  renderControls();
  renderLogits(result);
  renderMethods(result);
  renderRoot(result);
  renderPolytope(result);
  renderBudgets();
  renderNumbers(result);
  root.state = { ...state, ...result }; // for the tests
}

part("n").addEventListener("input", (event) => {
  const n = Number(event.target.value);
  const x = Array.from({ length: n }, (_, i) => state.x[i] ?? round(-1 - 0.5 * (i - state.x.length), 1));
  change({ x, k: Math.min(state.k, n), label: Math.min(state.label, n - 1) });
});
part("k").addEventListener("input", (event) => change({ k: Number(event.target.value) }));
part("temperature").addEventListener("input", (event) => change({ temperature: round(10 ** Number(event.target.value), 2) }));
for (const [title, preset] of Object.entries(PRESETS)) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: title });
  button.addEventListener("click", () => change(preset(state)));
  part("presets").append(button);
}
addEventListener("hashchange", () => {
  const found = read(location.hash);
  if (found) change(found);
});
buildMatrix();
let width = 0;
new ResizeObserver(() => {
  if (root.clientWidth === width) return;
  width = root.clientWidth;
  buildLogits();
  render();
}).observe(root);
