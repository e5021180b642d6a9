// Third part of the page's script: labels that are probably missing or wrong, with ticks, and the corrected file.
const SHARE = (p) => `${(100 * p).toFixed(p > 0.995 && p < 1 ? 1 : 0)} %`;

function saveAs(name, parts, type) {
  const link = make("a", {download: name, href: URL.createObjectURL(new Blob(parts, {type}))});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// What stands at a place of the file after some labels are added and some dropped; null if it stays. The places come
// from lastlayer/data/rewrite.py, which writes them in the same way.
function written(spot, add, drop) {
  if (spot.style === "flag") return add.includes(spot.labels[0]) ? spot.words[1] : drop.includes(spot.labels[0]) ? spot.words[0] : null;
  const kept = spot.labels.filter((name) => !drop.includes(name)), all = kept.concat(add.filter((name) => !kept.includes(name)));
  if (spot.style === "numbers" && all.every((name) => /^[0-9]+$/.test(name))) return `[${all.join(", ")}]`;
  let text = spot.style === "words" ? all.map((name) => spot.prefix + name).join(spot.join) + (all.length ? spot.after : spot.after.replace(/^ +/, ""))
    : `[${all.map((name) => JSON.stringify(name)).join(", ")}]`;
  if (spot.quote === "json") return JSON.stringify(text);
  if (spot.quote && [spot.quote, '"', "\n", "\r"].some((mark) => text.includes(mark))) text = `"${text.replaceAll('"', '""')}"`;
  return text;
}

function crc32(bytes) {
  const table = new Uint32Array(256);
  for (let n = 0; n < 256; n++) {
    let value = n;
    for (let i = 0; i < 8; i++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
    table[n] = value;
  }
  let crc = -1;
  for (const byte of bytes) crc = (crc >>> 8) ^ table[(crc ^ byte) & 255];
  return ~crc >>> 0;
}

function suggestions() {
  if (!byId("suggestions")) return () => {};
  const search = byId("suggest-search"), kind = byId("suggest-kind"), order = byId("suggest-order"), table = byId("suggest-table"), said = byId("suggest-said");
  let found = null, ticks = new Set(), source = null;
  const labelOf = (item) => found.names[item.label], rowOf = (item) => found.texts[item.row];
  const key = () => `lastlayer-ticks-${found.name}-${found.mark}`;
  const keep = () => { try { localStorage.setItem(key(), JSON.stringify([...ticks])); } catch (error) { /* storage is off */ } };
  function recall() {
    ticks = new Set();
    try { for (const rank of JSON.parse(localStorage.getItem(key()) || "[]")) if (Number.isInteger(rank) && rank >= 0 && rank < found.items.length) ticks.add(rank); } catch (error) { /* storage is off, or not ours */ }
  }
  const KINDS = {all: () => true, missing: (item) => item.missing, wrong: (item) => !item.missing, ticked: (item) => ticks.has(item.rank), open: (item) => !ticks.has(item.rank)};
  const ORDERS = {rank: (a, b) => a.rank - b.rank, row: (a, b) => a.row - b.row || a.rank - b.rank, label: (a, b) => a.label - b.label || a.rank - b.rank};
  const pages = pager(byId("suggest-pager"), 25, () => { refresh(); byId("suggestions").scrollIntoView(); });
  const rates = pager(byId("rate-pager"), 25, () => rateTable());
  const head = (...texts) => make("thead", {}, make("tr", {}, ...texts.map((text) => make("th", {scope: "col"}, text))));
  function chosenItems() {
    const wanted = search.value.trim().toLowerCase();
    const hit = (item) => !wanted || labelOf(item).toLowerCase().includes(wanted) || `${rowOf(item).id ?? ""} ${rowOf(item).text ?? ""}`.toLowerCase().includes(wanted);
    return found.items.filter((item) => KINDS[kind.value](item) && hit(item)).sort(ORDERS[order.value]);
  }
  function line(item) {
    const {id, text, labels} = rowOf(item), name = labelOf(item);
    const box = make("input", {type: "checkbox", "aria-label": `${item.missing ? "add" : "remove"} ${name}, row ${item.row}`, onchange: (event) => {
      if (event.target.checked) ticks.add(item.rank); else ticks.delete(item.rank);
      keep();
      tell();
    }});
    box.checked = ticks.has(item.rank);
    const what = make("span", {class: `chip ${item.missing ? "missed" : "wrong"}`}, shorten(name, LONG), make("span", {class: "hidden"}, item.missing ? "(probably missing)" : "(probably wrong)"));
    return make("tr", {}, make("td", {}, make("label", {class: "check"}, box, item.missing ? " add" : " remove")), make("td", {}, SHARE(item.probability)), make("td", {}, what),
      make("td", {class: "wide-cell"}, make("b", {}, id ?? `Row ${item.row}`), text ? make("span", {class: "what", title: text.length > 240 ? text : null}, shorten(text, 240)) : null,
        make("span", {class: "what"}, labels.length ? `has ${labels.map((label) => shorten(label, LONG)).join(", ")}` : "has no label")));
  }
  function tell() {
    const n = ticks.size;
    byId("suggest-count").textContent = `${count(chosenItems().length)} of ${count(found.items.length)} suggestions; ${count(n)} ticked` + (found.all > found.items.length ? `; the page holds the first ${count(found.items.length)} of ${count(found.all)}` : "");
    byId("suggest-corrected").disabled = !n || !source;
    byId("suggest-ticks").disabled = !n;
  }
  function refresh() {
    table.replaceChildren(head("Take", "Probability", "Label", "Row"), make("tbody", {}, ...pages.slice(chosenItems()).map(line)));
    tell();
  }
  function rateTable() {
    byId("rate-table").replaceChildren(head("Label", "Rows", "Written down"), make("tbody", {}, ...rates.slice(found.rates).map(([name, rows, rate]) => make("tr", {}, make("th", {scope: "row"}, breakable(name)), make("td", {}, count(rows)), make("td", {}, `about ${SHARE(rate)}`)))));
  }
  function corrected() {
    const rows = new Map(), encode = (text) => new TextEncoder().encode(text);
    for (const item of found.items) {
      if (!ticks.has(item.rank)) continue;
      if (!rows.has(item.row)) rows.set(item.row, {add: [], drop: []});
      rows.get(item.row)[item.missing ? "add" : "drop"].push(item.label);
    }
    const edits = [];
    for (const [row, {add, drop}] of rows) {
      const names = (labels) => labels.sort((a, b) => a - b).map((label) => found.names[label]);
      const more = names(add), less = names(drop);
      for (const spot of found.file.spots[row]) edits.push([spot, written(spot, more, less)]);
    }
    edits.sort((a, b) => a[0].start - b[0].start);
    const parts = [];
    let at = 0;
    for (const [spot, text] of edits) {
      if (text === null) continue;
      parts.push(source.subarray(at, spot.start), encode(text));
      at = spot.end;
    }
    return [...parts, source.subarray(at)];
  }
  function whole() {
    found = runs[chosen].suggestions;
    byId("suggestions").hidden = !found;
    if (!found) return;
    recall();
    source = found.file.text === null || found.file.text === undefined ? null : new TextEncoder().encode(found.file.text);
    const missing = found.items.filter((item) => item.missing).length;
    byId("suggest-lede").textContent = `${count(missing)} labels are probably missing and ${count(found.items.length - missing)} probably wrong, by models that have not seen the row. Labels are written down in about ${SHARE(found.rate)} of the rows that have them. Tick those that you agree with; the page remembers the ticks in this browser.`;
    byId("suggest-pick").hidden = !!source || !!found.file.why;
    byId("suggest-how").textContent = found.file.why ? `${found.file.why} Save the ticks, and run lastlayer suggest with --accept and that file.`
      : source ? `The corrected file has the format of ${found.file.name}; only labels that you ticked differ.`
      : `Choose ${found.file.name} (${count(found.file.size)} bytes), which is too large to be part of this page. It stays on this computer.`;
    byId("suggest-corrected").hidden = !!found.file.why;
    said.textContent = "";
    pages.page = rates.page = 0;
    refresh();
    rateTable();
  }
  byId("suggest-file").addEventListener("change", async (event) => {
    const file = event.target.files[0];
    source = null;
    if (file) {
      const bytes = new Uint8Array(await file.arrayBuffer());
      const same = bytes.length === found.file.size && crc32(bytes) === found.file.crc32;
      if (same) source = bytes;
      said.textContent = same ? "This is the file." : "This is not the file that the suggestions were made for, or it has changed since.";
    }
    tell();
  });
  byId("suggest-corrected").addEventListener("click", () => {
    saveAs(`corrected${found.file.suffix}`, corrected(), "application/octet-stream");
    said.textContent = `Saved, with ${count(ticks.size)} labels changed.`;
  });
  byId("suggest-ticks").addEventListener("click", () => {
    const rows = found.items.filter((item) => ticks.has(item.rank)).map((item) => [item.rank + 1, item.row, rowOf(item).id ?? "", labelOf(item), item.missing ? "missing" : "wrong", item.probability, "x"]);
    saveAs("suggestions.csv", ["\ufeff", csv([["rank", "row", "id", "label", "kind", "probability", "accept"], ...rows])], "text/csv");
  });
  for (const [id, tick] of [["suggest-all", true], ["suggest-none", false]]) byId(id).addEventListener("click", () => {
    for (const item of chosenItems()) if (tick) ticks.add(item.rank); else ticks.delete(item.rank);
    keep();
    refresh();
  });
  const first = () => { pages.page = 0; refresh(); };
  search.addEventListener("input", first);
  for (const node of [kind, order]) node.addEventListener("change", first);
  byId("rate-pager").append(csvButton("rates", () => [["label", "rows", "rate"], ...found.rates]));
  return whole;
}
