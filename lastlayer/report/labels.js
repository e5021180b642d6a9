// Second part of the page's script: single labels, in a table, by threshold, and between two runs.
const LONG = 48; // letters of a label's name in a chip or a list
const brief = (name) => make("span", {title: name.length > LONG ? name : null}, shorten(name, LONG));

// ---- tables of many rows: sorted, searched, a page at a time
function pager(holder, size, redraw) {
  const state = {page: 0, total: 0};
  const back = make("button", {type: "button", onclick: () => { state.page--; redraw(); }}, "Previous");
  const on = make("button", {type: "button", onclick: () => { state.page++; redraw(); }}, "Next");
  const text = make("span", {role: "status"});
  holder.append(back, text, on);
  state.slice = (items) => {
    const pages = Math.max(1, Math.ceil(items.length / size));
    state.page = Math.max(0, Math.min(state.page, pages - 1));
    const focused = document.activeElement;
    back.disabled = state.page === 0;
    on.disabled = state.page >= pages - 1;
    const from = state.page * size, part = items.slice(from, from + size);
    if (focused === back && back.disabled) on.focus(); // a button that is switched off would lose the focus
    if (focused === on && on.disabled) back.focus();
    text.textContent = items.length ? `${count(from + 1)}–${count(from + part.length)} of ${count(items.length)}` : "nothing found";
    return part;
  };
  return state;
}

const COLUMNS = [["name", "Label"], ["support", "Support"], ["f1", "F1"], ["precision", "Precision"], ["recall", "Recall"],
  ["average_precision", "AP"], ["threshold", "Threshold"], ["predicted", "Taken"], ["train", "Train rows"]];
// A long name may break after its separators.
const breakable = (text) => make("span", {class: "name"}, ...text.split(/(?<=[:/_.-])(?=[^:/_.-])/).flatMap((part, i) => i ? [make("wbr"), part] : [part]));
function labelTable() {
  const table = byId("label-table"), search = byId("label-search"), rule = byId("label-rule");
  const sort = {key: "support", down: true};
  const slider = thresholdSlider();
  let shown = null;
  const pages = pager(byId("label-pager"), 25, () => refresh());
  const column = (key) => {
    const labels = runs[chosen].labels, half = rule.value && ["precision", "recall", "f1"].includes(key);
    if (half) return labels[`half_${key}`];
    return rule.value && key === "predicted" ? undefined : labels[key];
  };
  const head = make("tr"), body = make("tbody");
  table.append(make("thead", {}, head), body);
  function heads() {
    shown = COLUMNS.filter(([key]) => column(key));
    if (!shown.some(([key]) => key === sort.key)) Object.assign(sort, {key: shown.some(([key]) => key === "support") ? "support" : "name", down: true});
    head.replaceChildren(...shown.map(([key, text]) => make("th", {scope: "col", "data-key": key, "aria-sort": sort.key === key ? (sort.down ? "descending" : "ascending") : null},
      make("button", {type: "button", onclick: () => {
        Object.assign(sort, {down: sort.key === key ? !sort.down : key !== "name", key});
        pages.page = 0;
        refresh();
        head.querySelector(`[data-key="${key}"] button`).focus();
      }}, text))));
  }
  function nameButton(i) {
    const {name} = runs[chosen].labels;
    return make("button", {type: "button", class: "pick-label", "aria-pressed": String(slider.now() === i), title: "precision and recall by threshold", onclick: (event) => {
      for (const other of body.querySelectorAll(".pick-label")) other.setAttribute("aria-pressed", String(other === event.currentTarget));
      slider.show(i);
      byId("threshold-plot")?.scrollIntoView({block: "nearest"});
    }}, breakable(names[name[i]]));
  }
  function refresh() {
    heads();
    const labels = runs[chosen].labels, wanted = search.value.trim().toLowerCase(), values = column(sort.key);
    const items = labels.name.map((_, i) => i).filter((i) => !wanted || names[labels.name[i]].toLowerCase().includes(wanted));
    const value = sort.key === "name" ? (i) => names[labels.name[i]] : (i) => values[i];
    items.sort((a, b) => {
      const x = value(a), y = value(b);
      if (x === null || y === null) return (x === null) - (y === null) || a - b; // what does not exist comes last
      const order = typeof x === "string" ? x.localeCompare(y, "en") : x - y;
      return (sort.down ? -order : order) || a - b;
    });
    body.replaceChildren(...pages.slice(items).map((i) => make("tr", {}, ...shown.map(([key]) => {
      if (key === "name") return make("th", {scope: "row"}, nameButton(i));
      const v = column(key)[i];
      if (["train", "support", "predicted"].includes(key)) return make("td", {}, count(v));
      if (key === "threshold") return make("td", {}, v === null ? "–" : v.toFixed(3));
      const fill = make("i");
      fill.style.width = `${100 * (v || 0)}%`;
      return make("td", {}, percent(v), make("span", {class: "meter", "aria-hidden": "true"}, fill));
    }))));
    if (labels.all > labels.name.length) body.append(make("tr", {}, make("th", {scope: "row", colspan: shown.length}, `The ${count(labels.name.length)} most frequent of ${count(labels.all)} labels.`)));
  }
  const whole = () => {
    const {labels} = runs[chosen];
    slider.show(0);
    rule.options[0].disabled = !labels.precision;
    rule.options[1].disabled = !labels.half_precision;
    if (rule.selectedOptions[0].disabled) rule.value = labels.precision ? "" : "half_";
    pages.page = 0;
    refresh();
  };
  const filter = () => { pages.page = 0; refresh(); };
  search.addEventListener("input", filter);
  byId("label-pager").append(csvButton("labels", () => {
    const {labels} = runs[chosen], keys = COLUMNS.filter(([key]) => labels[key]);
    return [keys.map(([, text]) => text), ...labels.name.map((name, i) => keys.map(([key]) => key === "name" ? names[name] : labels[key][i]))];
  }));
  rule.addEventListener("change", filter);
  return whole;
}

// ---- one label by threshold: every position of the slider is an exact count
function thresholdSlider() {
  const figure = byId("threshold-plot"), slider = byId("threshold-slider"), said = byId("threshold-now"), note = byId("threshold-note");
  if (!figure) return {show: () => {}, now: () => -1};
  let label = 0, points = [], support = 0, best = 0;
  const at = () => points.length - 1 - slider.value; // to the right, the threshold rises
  const words = (p) => `precision ${percent(p.precision)}, recall ${percent(p.recall)}, F1 ${percent(p.f1)} %`;
  const drawn = plot(figure, (width) => precisionRecall(points, at(), width));
  const move = () => {
    const p = points[at()];
    if (!p) return;
    said.textContent = `Threshold ${p.t.toPrecision(3)}: ${count(p.n)} row${p.n === 1 ? "" : "s"} get${p.n === 1 ? "s" : ""} the label, ${count(p.right)} rightly; ${words(p)}. Best F1: ${percent(points[best].f1)} % at ${points[best].t.toPrecision(3)}.`;
    slider.setAttribute("aria-valuetext", `${p.t.toPrecision(3)}: ${words(p)}`);
    drawn.redraw();
  };
  slider.addEventListener("input", move);
  const show = (i) => {
    const {labels, thresholds} = runs[chosen], flat = (thresholds && thresholds.points[i]) || [];
    label = i;
    support = labels.support ? labels.support[i] : 0;
    points = [];
    for (let j = 0; j < flat.length; j += 3) {
      const [t, n, right] = flat.slice(j, j + 3);
      points.push({t, n, right, precision: right / n, recall: right / support, f1: 2 * right / (n + support)});
    }
    best = points.reduce((first, p, j) => p.f1 > points[first].f1 ? j : first, 0);
    byId("threshold-label").textContent = labels.name.length ? shorten(names[labels.name[i]], 80) : "";
    slider.max = String(Math.max(points.length - 1, 0));
    slider.value = String(points.length - 1 - best);
    slider.disabled = points.length < 2;
    note.textContent = !thresholds ? "This run has no stored predictions."
      : i >= thresholds.points.length ? `The page has the curves of the ${count(thresholds.points.length)} most frequent of ${count(labels.all)} labels; this is none of them.`
      : !points.length ? "No held-out row with this label has a stored score."
      : thresholds.stored < labels.all ? `Scores are stored for the ${count(thresholds.stored)} most probable labels of each row; a label below them counts as not predicted.`
      : thresholds.points.length < labels.all ? `The page has the curves of the ${count(thresholds.points.length)} most frequent of ${count(labels.all)} labels.` : "";
    said.textContent = "";
    labelWords(labels, i);
    drawn.redraw();
    move();
  };
  return {show, now: () => label};
}
// What speaks for a label and against it: features with what each adds to the logit.
const adds = (pairs) => pairs.flatMap(([name, value], i) => [i ? ", " : "", make("b", {}, shorten(name, LONG)), ` ${value > 0 ? "+" : "\u2212"}${Math.abs(value)}`]);
function labelWords(labels, i) {
  const node = byId("label-words"), found = labels.words && labels.words[i];
  node.replaceChildren();
  if (!found) return;
  const [good, bad] = found;
  node.append(labels.exact ? "Largest weights. " : "Mean over rows of this page (gradient \u00d7 input). ", ...(good.length ? ["For: ", ...adds(good), ". "] : []), ...(bad.length ? ["Against: ", ...adds(bad), "."] : []));
}
function precisionRecall(points, at, width) {
  const height = Math.max(200, Math.min(280, width * 0.5)), left = 44, right = 14, top = 26, bottom = 40;
  const sx = (v) => left + v * (width - left - right), sy = (v) => height - bottom - v * (height - top - bottom);
  const svg = draw("svg", {class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "precision against recall of one label; the dot is the threshold of the slider"});
  for (const v of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(draw("line", {class: v ? "rule" : "axis", x1: left, x2: width - right, y1: sy(v), y2: sy(v)}),
      draw("text", {x: left - 7, y: sy(v) + 4, "text-anchor": "end"}, percent(v, 0)), draw("text", {x: sx(v), y: height - bottom + 18, "text-anchor": "middle"}, percent(v, 0)));
  }
  svg.append(draw("text", {x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle"}, "recall, %"), draw("text", {x: 0, y: 11}, "precision, %"));
  if (!points.length) return svg;
  svg.append(draw("path", {class: "line", d: `M${points.map((p) => `${sx(p.recall)} ${sy(p.precision)}`).join("L")}`, paint: {stroke: chosen}}));
  points.forEach((p, i) => svg.append(draw("circle", {cx: sx(p.recall), cy: sy(p.precision), r: i === at ? 7 : 2.2, class: i === at ? "now" : "", paint: {fill: chosen}})));
  return svg;
}

// ---- which labels two runs differ in
const MEASURES = [["f1", "F1"], ["precision", "Precision"], ["recall", "Recall"], ["average_precision", "AP"]];
function labelChanges() {
  const table = byId("change-table");
  if (!table) return;
  const [a, b, measure, order, least] = ["change-a", "change-b", "change-measure", "change-order", "change-least"].map(byId);
  const value = (run, key, i) => run.labels[key] ? run.labels[key][i] : null;
  const pages = pager(byId("change-pager"), 10, () => refresh());
  const found = () => {
    const [one, two] = [runs[a.value], runs[b.value]], key = measure.value, place = new Map(two.labels.name.map((name, i) => [name, i]));
    const rows = one.labels.name.map((name, i) => [name, i, place.get(name)]).filter(([, , j]) => j !== undefined)
      .map(([name, i, j]) => ({name, support: value(one, "support", i) ?? 0, x: value(one, key, i), y: value(two, key, j)}))
      .filter((row) => row.x !== null && row.y !== null && row.support >= Math.max(+least.value || 0, 0));
    const size = {most: (row) => -Math.abs(row.x - row.y), better: (row) => row.y - row.x, worse: (row) => row.x - row.y}[order.value];
    return rows.sort((p, q) => size(p) - size(q) || q.support - p.support);
  };
  const heads = () => ["Label", "Difference", runs[a.value].name, runs[b.value].name, "Support"];
  const head = make("tr"), body = make("tbody");
  table.append(make("thead", {}, head), body);
  function refresh() {
    const rows = found();
    head.replaceChildren(...heads().map((text) => make("th", {scope: "col"}, shorten(text, 28))));
    body.replaceChildren(...pages.slice(rows).map((row) => make("tr", {}, make("th", {scope: "row"}, breakable(names[row.name])),
      make("td", {}, make("span", {class: row.x > row.y ? "up" : row.x < row.y ? "down" : "same"}, `${row.x > row.y ? "▲ " : row.x < row.y ? "▼ " : ""}${signed(row.x - row.y)}`)),
      make("td", {}, percent(row.x)), make("td", {}, percent(row.y)), make("td", {}, count(row.support)))));
    const up = rows.filter((row) => row.x > row.y).length, down = rows.filter((row) => row.x < row.y).length;
    byId("change-count").textContent = `${runs[a.value].name} is better in ${count(up)} labels, ${runs[b.value].name} in ${count(down)}; ${count(rows.length - up - down)} are equal.`;
  }
  const whole = () => { pages.page = 0; refresh(); };
  for (const node of [a, b, measure, order]) node.addEventListener("change", whole);
  least.addEventListener("input", whole);
  byId("change-pager").append(csvButton("label differences", () => [heads(), ...found().map((row) => [names[row.name], +(row.x - row.y).toFixed(4), row.x, row.y, row.support])]));
  measure.replaceChildren(...MEASURES.filter(([key]) => runs.some((run) => run.labels[key])).map(([key, text]) => make("option", {value: key}, text)));
  refresh();
}
