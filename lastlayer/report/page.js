// Last part of the page's script: the sections, made of what plots.js draws; labels.js has those about single labels.
function curves() {
  if (!byId("curves")) return;
  for (const name of ["recall", "precision"]) {
    const some = runs.map((run, i) => [run.curve, i]).filter(([curve]) => curve);
    const series = some.map(([curve, i]) => ({name: runs[i].name, color: i, points: curve.k.map((k, j) => (
      {x: k, y: curve[name][j], low: curve[`${name}_low`][j], high: curve[`${name}_high`][j]}))}));
    const limit = some[0][0];
    series.push({name: "best possible", limit: true, points: limit.k.map((k, j) => ({x: k, y: limit[`${name}_limit`][j]}))});
    lines(byId(`${name}-plot`), {series, xName: "k", yName: `${name}, %`, y: [0, 1], whole: true,
      label: `${name} against the number of predicted labels, one line per run; arrow keys read the values`});
  }
}

function reliabilities() {
  if (!byId("reliability")) return;
  for (const kind of ["best", "all"]) {
    const figure = byId(`${kind}-plot`);
    const some = runs.map((run, i) => [run.reliability && run.reliability[kind], i]).filter(([bins]) => bins);
    if (!some.length) { figure.remove(); continue; }
    if (kind === "best") figure.querySelector("figcaption").textContent = `The ${runs[some[0][1]].reliability.k} best labels of each row`;
    const series = some.map(([bins, i]) => {
      const total = bins.pairs.reduce((a, b) => a + b, 0) || 1;
      return {name: runs[i].name, color: i, points: bins.pairs.map((n, b) => ({n, b})).filter(({n}) => n).map(({n, b}) => (
        {x: bins.confidence[b], y: bins.accuracy[b], r: 2.5 + 7 * Math.sqrt(n / total), text: `${percent(bins.accuracy[b])} % right of ${count(n)}`}))};
    });
    series.push({name: "as sure as right", limit: true, points: [{x: 0, y: 0}, {x: 1, y: 1}]});
    lines(figure, {series, xName: "confidence", yName: "right, %", x: [0, 1], y: [0, 1],
      label: "share of labels that are right against their confidence, one line per run; arrow keys read the values"});
  }
}

function gains() {
  const figure = byId("gain-plot");
  if (!figure) return;
  const some = runs.map((run, i) => [run.errors, i]).filter(([errors]) => errors);
  const kinds = [...new Set(some.flatMap(([errors]) => errors.kinds.map((kind) => kind.name)))];
  const gain = (errors, name) => (errors.kinds.find((kind) => kind.name === name) || {gain: 0}).gain;
  const top = Math.max(1e-9, ...some.flatMap(([errors]) => errors.kinds.map((kind) => kind.gain)));
  kinds.sort((a, b) => gain(some[0][0], b) - gain(some[0][0], a));
  figure.querySelector("figcaption").textContent = `Gain of ${some[0][0].metric === "f1" ? "F1" : some[0][0].metric} if a kind of error were mended, points`;
  const off = new Set();
  if (some.length > 1) figure.append(keys(some.map(([, i]) => ({name: runs[i].name, icon: make("span", {class: `dot c${i % 8}`, "aria-hidden": "true"})})), off, () => drawn.redraw()));
  const drawn = plot(figure, (width) => {
    const shown = some.filter(([, i]) => !off.has(runs[i].name));
    const thick = some.length > 1 ? 11 : 20, group = Math.max(shown.length, 1) * (thick + 2) + 14, left = 112, right = 52;
    const height = kinds.length * group + 6;
    const svg = draw("svg", {class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "gain by kind of error; the table below has the numbers"});
    kinds.forEach((name, row) => {
      svg.append(draw("text", {class: "name", x: left - 10, y: row * group + (group - 10) / 2 + 4, "text-anchor": "end"}, name));
      shown.forEach(([errors, i], j) => {
        const value = gain(errors, name), y = row * group + j * (thick + 2), length = Math.max(value, 0) / top * (width - left - right);
        const bar = draw("rect", {x: left, y, width: Math.max(length, 1.5), height: thick, rx: 2, paint: {fill: i}});
        const kind = errors.kinds.find((one) => one.name === name);
        const text = kind ? `${runs[i].name}\n${name}: ${kind.meaning}\ngain ${signed(value)} points` : "";
        bar.addEventListener("pointermove", (event) => showTip(text, event.clientX, event.clientY));
        bar.addEventListener("pointerleave", hideTip);
        svg.append(bar, draw("text", {x: left + Math.max(length, 1.5) + 6, y: y + thick / 2 + 4}, signed(value)));
      });
    });
    return svg;
  });
}

const ORACLES = {
  "no false alarms": "every wrong label taken out",
  "no misses": "every missed label put in",
  "true count": "each row had as many labels as it truly has",
  "best thresholds": "one threshold per label, the best on these rows",
};
function errors() {
  if (!byId("errors")) return;
  const found = runs[chosen].errors, table = byId("kind-table"), list = byId("confusions");
  byId("errors-note").textContent = runs[chosen].note || "";
  for (const node of [table, list, byId("oracle-table")]) node.replaceChildren();
  if (!found) { list.append(make("li", {}, "This run has no stored predictions.")); return; }
  const total = Math.max(found.n_false_alarms + found.n_misses, 1);
  const kinds = found.kinds.slice().sort((a, b) => b.gain - a.gain);
  const line = (name, what, ...cells) => make("tr", {}, make("th", {scope: "row"}, name, make("span", {class: "what"}, what)), ...cells.map((cell) => make("td", {}, cell)));
  const heads = (...texts) => make("thead", {}, make("tr", {}, ...texts.map((text) => make("th", {scope: "col"}, text))));
  table.append(heads("Kind", "Gain", "Share", "Wrong / missed"),
    make("tbody", {}, ...kinds.map((kind) => line(kind.name, kind.meaning, signed(kind.gain),
      `${Math.round(100 * (kind.false_alarms + kind.misses) / total)} %`, `${count(kind.false_alarms)} / ${count(kind.misses)}`))));
  byId("oracle-table").replaceChildren(heads("If", "Gain"), make("tbody", {}, ...Object.entries(found.oracles).map(([name, gain]) => line(name, ORACLES[name] || "", signed(gain)))));
  const most = Math.max(1, ...found.confusions.map((one) => one.count));
  for (const one of found.confusions.slice(0, 12)) {
    const fill = make("i");
    fill.style.width = `${100 * one.count / most}%`;
    list.append(make("li", {}, make("span", {}, brief(one.predicted_name), make("em", {}, " in place of "), brief(one.truth_name)),
      make("b", {}, count(one.count)), make("span", {class: "track"}, fill)));
  }
  if (!found.confusions.length) list.append(make("li", {}, "None."));
  if (found.confusions.length > 12) list.append(make("li", {}, make("em", {}, `The 12 most frequent of ${count(found.confusions.length)} pairs that were counted.`)));
}

function together() {
  if (!byId("together")) return;
  const pairs = (runs[chosen].errors || {cooccurrence: []}).cooccurrence.slice(0, 12), heat = runs[chosen].together;
  for (const figure of [byId("pair-plot"), byId("heat-plot")]) figure.querySelectorAll(".keys, .slot, .how, details").forEach((node) => node.remove());
  if (pairs.length) {
    const key = (hollow, text) => {
      const icon = draw("svg", {viewBox: "0 0 22 12", class: "plot", "aria-hidden": "true"});
      const dot = draw("circle", {cx: 11, cy: 6, r: 4.5, class: hollow ? "hollow" : "", paint: hollow ? {stroke: 0} : {fill: 1}});
      icon.append(dot);
      return make("li", {}, icon, text);
    };
    byId("pair-plot").append(make("ul", {class: "keys"}, key(true, "rows with both, in the data"), key(false, "in the predictions")));
    plot(byId("pair-plot"), (width) => pairPlot(pairs, width));
    byId("pair-plot").append(make("details", {}, make("summary", {}, "Show the numbers"), make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Pairs of labels"},
      make("table", {}, make("thead", {}, make("tr", {}, ...["Pair", "Data", "Predictions"].map((text) => make("th", {scope: "col"}, text)))),
        make("tbody", {}, ...pairs.map((pair) => make("tr", {}, make("th", {scope: "row"}, `${pair.first_name} + ${pair.second_name}`), make("td", {}, count(pair.true)), make("td", {}, count(pair.predicted)))))))));
  } else byId("pair-plot").append(make("p", {class: "how"}, "No pair differs."));
  if (heat && heat.labels.length > 1) {
    byId("heat-plot").append(make("p", {class: "how"}, "Below the diagonal: the data. Above: the predictions. The stronger the colour, the more of the rows with either label have both; a model that has learnt which labels come together is symmetric."
      + (runs[chosen].labels.all > heat.labels.length ? ` The ${heat.labels.length} most frequent of ${count(runs[chosen].labels.all)} labels are shown.` : "")));
    plot(byId("heat-plot"), (width) => heatPlot(heat, width));
  } else byId("heat-plot").append(make("p", {class: "how"}, "Fewer than two labels occur."));
}
// Two names in a given number of letters: each is shortened by itself, and a short one leaves its room to the other.
function both(a, b, letters) {
  const [n, m] = [[...a].length, [...b].length], half = Math.floor(letters / 2);
  return `${shorten(a, Math.max(half, letters - m))} + ${shorten(b, Math.max(half, letters - n))}`;
}
function pairPlot(pairs, width) {
  const step = 42, height = pairs.length * step + 22, right = 40, top = Math.max(1, ...pairs.flatMap((p) => [p.predicted, p.true]));
  const sx = (v) => 8 + v / top * (width - 8 - right);
  const svg = draw("svg", {class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "rows with both labels of a pair, in the data and in the predictions"});
  for (const v of ticks(0, top, 4)) {
    svg.append(draw("line", {class: "rule", x1: sx(v), x2: sx(v), y1: 0, y2: height - 18}), draw("text", {x: sx(v), y: height - 4, "text-anchor": "middle"}, count(v)));
  }
  pairs.forEach((pair, i) => {
    const y = i * step + 28, letters = Math.floor((width - 16) / 6.6) - 3;
    svg.append(draw("text", {class: "name", x: 8, y: y - 12}, both(pair.first_name, pair.second_name, letters)));
    const group = draw("g", {}, draw("line", {class: "join", x1: sx(pair.true), x2: sx(pair.predicted), y1: y, y2: y}),
      draw("circle", {cx: sx(pair.predicted), cy: y, r: 5.5, paint: {fill: 1}}),
      draw("circle", {class: "hollow", cx: sx(pair.true), cy: y, r: 5.5, paint: {stroke: 0}}),
      draw("rect", {x: 0, y: y - 26, width, height: step - 2, fill: "transparent"}));
    group.addEventListener("pointermove", (event) => showTip(`${pair.first_name} + ${pair.second_name}\ndata: ${count(pair.true)} rows\npredictions: ${count(pair.predicted)} rows`, event.clientX, event.clientY));
    group.addEventListener("pointerleave", hideTip);
    svg.append(group);
  });
  return svg;
}
function heatPlot(heat, width) {
  const n = heat.labels.length, left = Math.min(170, width * 0.42), cell = (width - left) / n, tall = Math.max(cell, 15), height = n * tall + 22;
  const svg = draw("svg", {class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "overlap of the most frequent labels, data below and predictions above the diagonal"});
  for (let i = 0; i < n; i++) {
    const name = names[heat.labels[i]];
    svg.append(draw("text", {class: "name", x: left - 8, y: 22 + (i + 0.5) * tall + 4, "text-anchor": "end"}, `${shorten(name, Math.floor((left - 30) / 7))} ${i + 1}`));
    if (cell > 17 || i % 2 === 0) svg.append(draw("text", {x: left + (i + 0.5) * cell, y: 14, "text-anchor": "middle"}, String(i + 1)));
    for (let j = 0; j < n; j++) {
      if (i === j) continue;
      const part = j > i ? "predicted" : "true", value = heat[part][i][j];
      const box = draw("rect", {x: left + j * cell + 0.5, y: 22 + i * tall + 0.5, width: cell - 1, height: tall - 1, rx: 2, paint: {fill: part === "true" ? 0 : 1}});
      box.style.opacity = String(0.05 + 0.95 * Math.sqrt(value));
      const text = `${name} + ${names[heat.labels[j]]}\n${part === "true" ? "data" : "predictions"}: ${count(heat[`${part}_rows`][i][j])} rows, ${percent(value, 0)} % of those with either`;
      box.addEventListener("pointermove", (event) => showTip(text, event.clientX, event.clientY));
      box.addEventListener("pointerleave", hideTip);
      svg.append(box);
    }
  }
  return svg;
}

function differences() {
  const table = byId("difference-table");
  if (!table) return;
  const reference = +byId("reference").value, {metrics, pairs} = data.comparison;
  const others = runs.map((_, i) => i).filter((i) => i !== reference);
  const last = Math.max(...metrics.filter((m) => m.includes("@")).map((m) => +m.split("@")[1]));
  const shown = metrics.filter((m) => !m.includes("@") || +m.split("@")[1] === last || m === "precision@1");
  const least = data.comparison.least;
  const cell = (one) => {
    const sure = one.p < 0.05, digits = one.p < 0.1 ? +one.p.toPrecision(1) : one.p.toFixed(2);
    return make("td", {}, make("span", {class: sure ? (one.difference > 0 ? "up" : "down") : "same"}, `${sure ? (one.difference > 0 ? "▲ " : "▼ ") : "≈ "}${signed(one.difference)}`),
      make("span", {class: "ci"}, `${signed(one.low)} to ${signed(one.high)}`), make("span", {class: "ci"}, `p ${one.p <= least * 1.001 ? "≤" : "="} ${digits}`));
  };
  const fill = (node, columns) => node.replaceChildren(
    make("thead", {}, make("tr", {}, make("th", {scope: "col"}, "Run"), ...columns.map((m) => make("th", {scope: "col"}, title(m))))),
    make("tbody", {}, ...others.map((i) => make("tr", {}, make("th", {scope: "row"}, make("span", {class: `dot c${i % 8}`, "aria-hidden": "true"}), runs[i].name),
      ...columns.map((m) => cell(pairs[i][reference][m]))))));
  fill(table, shown);
  fill(byId("difference-all"), metrics);
  const grid = byId("forest");
  grid.replaceChildren();
  for (const m of shown) {
    const found = others.map((i) => [i, pairs[i][reference][m]]);
    const reach = Math.max(0.002, ...found.flatMap(([, one]) => [Math.abs(one.low), Math.abs(one.high)])) * 1.08;
    const figure = grid.appendChild(make("figure", {}, make("figcaption", {}, `${title(m)}, points against ${runs[reference].name}`)));
    plot(figure, (width) => {
      const left = Math.min(140, width * 0.34), step = 24, height = found.length * step + 28;
      const sx = (v) => left + (v + reach) / (2 * reach) * (width - left - 12);
      const svg = draw("svg", {class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `differences in ${title(m)}; the table below has the numbers`});
      for (const v of ticks(-reach, reach, 4)) {
        svg.append(draw("line", {class: Math.abs(v) < 1e-9 ? "axis" : "rule", x1: sx(v), x2: sx(v), y1: 0, y2: height - 22}), draw("text", {x: sx(v), y: height - 6, "text-anchor": "middle"}, signed(v).replace("±", "").replace(".0", "")));
      }
      found.forEach(([i, one], row) => {
        const y = row * step + 14, bar = draw("line", {class: "line", x1: sx(one.low), x2: sx(one.high), y1: y, y2: y, paint: {stroke: i}});
        svg.append(draw("text", {class: "name", x: 0, y: y + 4}, shorten(runs[i].name, Math.floor(left / 7))), bar, marker(sx(one.difference), y, 4.5, i));
      });
      return svg;
    });
  }
}

function examples() {
  const list = byId("example-list");
  if (!list) return () => {};
  const search = byId("example-search"), kind = byId("example-kind"), order = byId("example-order"), all = byId("example-all");
  const found = runs.map((run) => new Map(run.examples.map((one) => [one.x, one])));
  const errorsOf = (one) => one.a.filter((k, i) => !isRight(one, i)).length + one.m.length;
  const isRight = (one, i) => one.t.includes(one.p[i]);
  const FILTERS = {
    all: ["every row", () => true],
    wrong: ["any error", (one) => errorsOf(one) > 0],
    right: ["all right", (one) => errorsOf(one) === 0],
    none: ["nothing right", (one) => !one.a.some((_, i) => isRight(one, i))],
    first: ["best label wrong", (one) => one.n > 0 && !isRight(one, 0)],
    alarms: ["wrong labels", (one) => one.a.some((_, i) => !isRight(one, i))],
    misses: ["missed labels", (one) => one.m.length > 0],
    ...Object.fromEntries(data.kinds.map((name, k) => [`kind-${k}`, [`error: ${name}`, (one) => one.a.includes(k) || one.m.some((miss) => miss[2] === k)]])),
  };
  const KEYS = {
    row: (one) => one.x,
    errors: (one) => -errorsOf(one),
    fewest: (one) => errorsOf(one),
    sure: (one) => -Math.max(-1, ...one.a.map((_, i) => isRight(one, i) ? -1 : one.q[i])),
  };
  const pages = pager(byId("example-pager"), 10, () => { refresh(); byId("examples").scrollIntoView(); });
  const lower = data.texts.map((one) => `${one.id ?? ""} ${one.text ?? ""}`.toLowerCase());
  const matches = (one, wanted) => lower[one.x].includes(wanted) || one.t.concat(one.p.slice(0, one.n)).some((label) => names[label].toLowerCase().includes(wanted));
  function counts() {
    const now = kind.value || "all";
    kind.replaceChildren(...Object.entries(FILTERS).map(([key, [text, test]]) => make("option", {value: key}, `${text} (${count(runs[chosen].examples.filter(test).length)})`)));
    kind.value = now;
  }
  function chip(kindOf, label, thousandth, error) {
    const words = {right: "right", wrong: "wrong", missed: "missed", next: "not taken"}[kindOf];
    return make("span", {class: `chip ${kindOf}`, title: `${names[label].length > LONG ? names[label] + " \u2014 " : ""}${error >= 0 ? `${words}: ${data.kinds[error]}` : words}`}, shorten(names[label], LONG),
      thousandth === null || thousandth === undefined ? null : make("small", {}, (thousandth / 1000).toFixed(2)),
      make("span", {class: "hidden"}, `(${words}${error >= 0 ? ": " + data.kinds[error] : ""})`));
  }
  function line(run, one) {
    const chips = one.p.map((label, i) => i < one.n ? chip(isRight(one, i) ? "right" : "wrong", label, one.q[i], isRight(one, i) ? -1 : one.a[i])
      : one.m.some((miss) => miss[0] === label) ? null : chip("next", label, one.q[i], -1));
    const cut = one.n;
    return make("div", {class: "row"}, make("div", {class: "who"}, many ? make("span", {class: `dot c${run % 8}`, "aria-hidden": "true"}) : null, many ? runs[run].name : "Predicted"),
      make("div", {}, ...chips.slice(0, cut), ...one.m.map(([label, q, error]) => chip("missed", label, q, error)), ...chips.slice(cut)));
  }
  function why(run, one) {
    if (!one.w) return null;
    const line = ([label, good, bad]) => make("tr", {}, make("th", {scope: "row"}, brief(names[label])), make("td", {}, ...(good.length ? adds(good) : ["\u2013"])), make("td", {}, ...(bad.length ? adds(bad) : ["\u2013"])));
    return make("details", {class: "why"}, make("summary", {}, many ? `Why (${runs[run].name})` : "Why"),
      make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Why these labels"}, make("table", {class: "plain left"}, make("thead", {}, make("tr", {}, ...["Label", "Speaks for it", "Against it"].map((text) => make("th", {scope: "col"}, text)))), make("tbody", {}, ...one.w.map(line)))),
      make("p", {class: "how"}, runs[run].labels.exact ? "What each word or feature adds to the label's logit." : "Each feature's share of the label's logit, to first order (gradient \u00d7 input)."));
  }
  function body(text, wanted) {
    if (!text) return make("p", {class: "text"}, make("em", {}, "no text was stored for this row"));
    const long = text.length > 420 && !wanted, node = make("p", {class: "text"});
    const fill = (value) => {
      const low = value.toLowerCase();
      let from = 0;
      for (let at = wanted && low.length === value.length ? low.indexOf(wanted) : -1; at >= 0; at = low.indexOf(wanted, from)) {
        node.append(value.slice(from, at), make("mark", {}, value.slice(at, at + wanted.length)));
        from = at + wanted.length;
      }
      node.append(value.slice(from));
    };
    fill(long ? text.slice(0, 400) + "…" : text);
    if (long) node.append(make("button", {type: "button", class: "more", onclick: () => { node.textContent = text; node.tabIndex = -1; node.focus(); }}, "more"));
    return node;
  }
  function refresh() {
    const wanted = search.value.trim().toLowerCase(), test = (FILTERS[kind.value] || FILTERS.all)[1], key = KEYS[order.value];
    const items = runs[chosen].examples.filter((one) => test(one) && (!wanted || matches(one, wanted)));
    items.sort((a, b) => key(a) - key(b) || a.x - b.x);
    const kept = runs[chosen].examples.length;
    byId("example-count").textContent = `${count(items.length)} of ${count(kept)} rows${kept < runs[chosen].rows ? `; the page holds ${count(kept)} of the ${count(runs[chosen].rows)} held-out rows` : ""}`;
    list.replaceChildren(...pages.slice(items).map((one) => {
      const text = data.texts[one.x], wrong = errorsOf(one);
      const shown = all && all.checked ? runs.map((_, i) => i) : [chosen];
      return make("article", {}, make("h3", {}, text.id ?? `Row ${text.row}`, make("span", {}, `row ${text.row} · ${wrong === 0 ? "all right" : `${wrong} error${wrong > 1 ? "s" : ""}`}`)),
        body(text.text, wanted),
        make("div", {class: "row"}, make("div", {class: "who"}, "True"), make("div", {}, ...one.t.map((label) => make("span", {class: "chip", title: names[label].length > LONG ? names[label] : null}, shorten(names[label], LONG))), one.t.length ? null : make("em", {class: "who"}, "no labels"))),
        ...shown.map((i) => found[i].has(one.x) ? line(i, found[i].get(one.x)) : null),
        ...shown.map((i) => found[i].has(one.x) ? why(i, found[i].get(one.x)) : null));
    }));
  }
  const whole = () => { pages.page = 0; refresh(); };
  for (const node of [kind, order, all]) node?.addEventListener("change", whole);
  search.addEventListener("input", whole);
  return () => { counts(); whole(); };
}

function history() {
  const pick = byId("history-metric");
  if (!pick) return;
  const skip = new Set(["epoch", "step", "lr", "train_loss", "valid_loss", "seconds"]);
  const columns = [...new Set(runs.flatMap((run) => run.history.flatMap((row) => Object.keys(row))))].filter((name) => !skip.has(name));
  pick.append(...columns.map((name) => make("option", {value: name}, title(name))));
  const monitor = runs.map((run) => run.monitor).find((name) => columns.includes(name));
  if (monitor) pick.value = monitor;
  if (!columns.length) pick.closest(".tools").remove();
  const grid = byId("history-plots");
  const series = (name, title, color, run, extra) => ({name: title, color, points: run.history.map((row, i) => ({x: row.epoch ?? i, y: row[name] ?? null})), ...extra});
  const metric = columns.length ? grid.appendChild(make("figure", {}, make("figcaption"))) : null;
  const redraw = () => {
    metric.replaceChildren(make("figcaption", {}, `${title(pick.value)} on validation rows`));
    lines(metric, {series: runs.map((run, i) => series(pick.value, run.name, i, run)).filter((one) => one.points.length), xName: "epoch", yName: "%", whole: true,
      label: `${title(pick.value)} on validation rows by epoch, one line per run`});
  };
  if (metric) { pick.addEventListener("change", redraw); redraw(); }
  runs.forEach((run, i) => {
    const parts = [series("train_loss", "training", i, run), series("valid_loss", "validation", i, run, {dash: true, bare: true})].filter((one) => one.points.some((p) => p.y !== null));
    if (!parts.length) return;
    const figure = grid.appendChild(make("figure", {}, make("figcaption", {}, many ? `Loss: ${run.name}` : "Loss")));
    lines(figure, {series: parts, xName: "epoch", yName: "loss", whole: true, format: (v) => String(+v.toPrecision(4)), label: "loss by epoch, training and validation"});
  });
}

function here() {
  const links = new Map([...document.querySelectorAll(".bar a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => {
    for (const {target, isIntersecting} of entries) {
      if (!isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(target.id)?.setAttribute("aria-current", "true");
    }
  }, {rootMargin: "-20% 0px -75% 0px"});
  document.querySelectorAll("main section").forEach((section) => seen.observe(section));
}

theme();
curves();
reliabilities();
gains();
history();
const labels = labelTable(), explorer = examples(), list = suggestions();
labelChanges();
for (const [node, name] of [["all-metrics", "metrics"], ["set-metrics", "label sets"], ["kind-table", "errors"], ["difference-all", "differences"]]) {
  const region = byId(node)?.closest(".scroll");
  region?.after(csvOf(region, name));
}
function detail() {
  for (const node of document.querySelectorAll(".of")) node.textContent = many ? `: ${runs[chosen].name}` : "";
  errors();
  together();
  labels();
  explorer();
  list();
}
byId("run")?.addEventListener("change", (event) => { chosen = +event.target.value; detail(); });
detail();
byId("reference")?.addEventListener("change", differences);
differences();
here();
document.documentElement.dataset.ready = "true";
