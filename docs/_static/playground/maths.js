// The projections of the playground for one row of logits, in double precision. Plain and short rather than fast: a row
// has a few classes. tests/docs/test_playground.py holds every number against the Python package.

const sum = (values) => values.reduce((total, value) => total + value, 0);
const fill = (x, value) => x.map(() => value);

export const sigmoid = (x) => (x >= 0 ? 1 / (1 + Math.exp(-x)) : Math.exp(x) / (1 + Math.exp(x)));
const logSigmoid = (x) => Math.min(x, 0) - Math.log1p(Math.exp(-Math.abs(x)));

export function softmax(x) {
  const top = Math.max(...x);
  const weights = x.map((value) => Math.exp(value - top));
  const total = sum(weights);
  return weights.map((weight) => weight / total);
}

/** The residual whose root is nu: g(nu) = sum sigmoid(x + nu) - k. */
export const residual = (x, k, nu) => sum(x.map((value) => sigmoid(value + nu))) - k;

/** Exact bounds of nu from two order statistics, as in lastlayer/project/lml.py. */
export function bracket(x, k) {
  const ranked = [...x].sort((a, b) => b - a);
  const n = x.length;
  const [upper, lower] = [Math.ceil(k), Math.floor(k) + 1];
  const low = Math.log((k - upper + 1) / (n - k)) - ranked[upper - 1];
  const high = Math.log(k / (lower - k)) - ranked[lower - 1];
  return [low, high];
}

/**
 * Find nu. Each step is the better of Halley's, third order, and the root of a quadratic in exp(step) that never passes
 * the solution; both are kept inside the bracket.
 */
export function solve(x, k) {
  if (k <= 0 || k >= x.length) return { nu: k <= 0 ? -Infinity : Infinity, iterates: [], bounds: null };
  const bounds = bracket(x, k);
  let [low, high] = bounds;
  let nu = (low + high) / 2;
  const iterates = [nu];
  for (let pass = 0; pass < 40; pass++) {
    const { step, safe, f, r } = advance(x, k, nu);
    if (f === 0) break;
    if (f < 0) low = Math.max(low, nu + safe);
    else high = Math.min(high, nu + safe);
    const next = nu + step;
    const moved = next >= low && next <= high ? next : (low + high) / 2;
    if (moved === nu) break;
    nu = moved;
    iterates.push(nu);
    if (Math.abs(r) < 1e-5) break; // Halley's error is of the order of r^3
  }
  return { nu, iterates, bounds };
}

function advance(x, k, nu) {
  // Sums of y or 1 - y, whichever is small: across a wide gap sum(y) - k would be all rounding.
  const parts = x.map((value) => ({ above: value + nu > 0, w: sigmoid(-Math.abs(value + nu)) }));
  const surplus = parts.filter(({ above }) => above).length - k;
  const signed = (part) => sum(parts.map(({ above, w }) => (above ? -part(w) : part(w))));
  const f = surplus + signed((w) => w);
  const c = surplus + signed((w) => w * w * (3 - 2 * w));
  const a = sum(parts.map(({ above, w }) => w * (1 - w) * (above ? 1 - w : w)));
  const b = sum(parts.map(({ above, w }) => w * (1 - w) * (above ? w : 1 - w)));
  const r = f / (a + b);
  const root = Math.sqrt(c * c + 4 * a * b);
  let safe = c > 0 ? Math.log((2 * a) / (c + root)) : Math.log((root - c) / (2 * b));
  if (safe < 0 !== f > 0) safe = 0;
  const halley = -r / (1 - (r * (b - a)) / (a + b) / 2);
  const step = Math.abs(r) < 1 && Math.abs(halley) > Math.abs(safe) ? halley : safe;
  return { step, safe, f, r };
}

export function lml(x, k) {
  const { nu } = solve(x, k);
  return x.map((value) => sigmoid(value + nu));
}

/** min(1, exp(x - tau)): the fewest classes at 1 for which no other class exceeds 1. */
export function cappedSoftmax(x, k) {
  if (k <= 0 || k >= x.length) return fill(x, k <= 0 ? 0 : 1);
  const ranked = [...x].sort((a, b) => b - a);
  for (let full = 0; ; full++) {
    const top = ranked[full];
    const mass = sum(ranked.slice(full).map((value) => Math.exp(value - top)));
    const tau = top + Math.log(mass / (k - full));
    if (top <= tau || full + 1 >= k) return x.map((value) => Math.exp(Math.min(0, value - tau)));
  }
}

/** clip(x - tau, 0, 1): the sum falls in tau in straight pieces, between the points where a class enters or leaves. */
export function cappedSparsemax(x, k) {
  if (k <= 0 || k >= x.length) return fill(x, k <= 0 ? 0 : 1);
  const clipped = (tau) => x.map((value) => Math.min(1, Math.max(0, value - tau)));
  const corners = x.flatMap((value) => [value - 1, value]).sort((a, b) => a - b);
  for (let i = 1; i < corners.length; i++) {
    const [left, right] = [corners[i - 1], corners[i]];
    const [above, below] = [sum(clipped(left)), sum(clipped(right))];
    if (below <= k) {
      const share = above > below ? (above - k) / (above - below) : 0;
      return clipped(left + share * (right - left));
    }
  }
  return clipped(corners.at(-1));
}

/** LML with a cost per class: sigmoid(x + cost nu) with sum cost y = budget, by halving; a class of cost 0 is free. */
export function weighted(x, cost, budget) {
  const at = (nu) => x.map((value, i) => (cost[i] === 0 ? sigmoid(value) : sigmoid(value + cost[i] * nu)));
  const spent = (nu) => sum(at(nu).map((p, i) => cost[i] * p));
  if (budget <= 0 || budget >= sum(cost)) return at(budget <= 0 ? -Infinity : Infinity);
  let [low, high] = [-1, 1];
  while (spent(low) > budget) low *= 2;
  while (spent(high) < budget) high *= 2;
  for (let i = 0; i < 100; i++) {
    const middle = (low + high) / 2;
    if (spent(middle) < budget) low = middle;
    else high = middle;
  }
  return at((low + high) / 2);
}

/** Rows of sum k and columns of equal sums, every entry at most 1: rows and columns are solved in turn. */
export function balanced(x, k) {
  const [n, m] = [x.length, x[0].length];
  if (k <= 0 || k >= m) return x.map((row) => fill(row, k <= 0 ? 0 : 1));
  const capacity = (n * k) / m;
  let mu = fill(x[0], 0);
  let y = x;
  for (let turn = 0; turn < 1000; turn++) {
    const rows = x.map((row) => row.map((value, j) => value + mu[j]));
    const nu = rows.map((row) => solve(row, k).nu);
    y = rows.map((row, i) => row.map((value) => sigmoid(value + nu[i])));
    const off = mu.map((_, j) => Math.abs(sum(y.map((row) => row[j])) - capacity));
    if (Math.max(...off) < 1e-10 * capacity) break;
    mu = mu.map((_, j) => solve(x.map((row, i) => row[j] + nu[i]), capacity).nu);
  }
  return y;
}

export const METHODS = {
  sigmoid: { name: "sigmoid", project: (x) => x.map(sigmoid), usesK: false },
  softmax: { name: "softmax", project: softmax, usesK: false },
  cappedSoftmax: { name: "capped softmax", project: cappedSoftmax, usesK: true },
  cappedSparsemax: { name: "capped sparsemax", project: cappedSparsemax, usesK: true },
  lml: { name: "LML", project: lml, usesK: true },
};

/** How fast each class moves with its own score while the threshold is held. */
function slopes(method, y) {
  const free = (p) => p > 0 && p < 1;
  if (method === "softmax") return y;
  if (method === "cappedSoftmax") return y.map((p) => (free(p) ? p : 0));
  if (method === "cappedSparsemax") return y.map((p) => (free(p) ? 1 : 0));
  return y.map((p) => p * (1 - p));
}

/** dy_i / dx_j for all i: what happens to each probability when logit j rises. */
export function gradient(method, y, j, temperature = 1) {
  const h = slopes(method, y);
  const total = sum(h);
  return h.map((slope, i) => {
    const own = i === j ? slope : 0;
    const shared = method === "sigmoid" || total === 0 ? 0 : (slope * h[j]) / total;
    return (own - shared) / temperature;
  });
}

/** Where one step of training with lml_loss on the label j pushes each logit: -d(-log y_j) / dx_i. */
export function push(scores, nu, j, temperature = 1) {
  if (!Number.isFinite(nu)) return fill(scores, 0);
  const depth = scores.map((value) => -Math.abs(value + nu));
  const share = softmax(depth.map((d) => d - 2 * Math.log1p(Math.exp(d)))); // of y (1 - y), without underflow
  const room = sigmoid(-(scores[j] + nu));
  return share.map((part, i) => (room * ((i === j ? 1 : 0) - part)) / temperature);
}

/** Everything the page shows for one state. */
export function evaluate({ x, k, temperature, label }) {
  const scores = x.map((value) => value / temperature);
  const y = {}, gradients = {};
  for (const [key, method] of Object.entries(METHODS)) {
    y[key] = method.project(scores, k);
    gradients[key] = gradient(key, y[key], label, temperature);
  }
  const { nu, iterates, bounds } = solve(scores, k);
  const loss = -logSigmoid(scores[label] + nu);
  return { scores, y, gradients, pushes: push(scores, nu, label, temperature), nu, iterates, bounds, loss };
}

/** Corners of {0 <= y <= 1, sum y = k} for three classes, in order around the middle. */
export function polygon(k) {
  const corners = [];
  for (let axis = 0; axis < 3; axis++) { // where the plane meets the twelve edges of the cube
    for (const p of [0, 1]) {
      for (const q of [0, 1]) {
        const rest = k - p - q;
        if (rest < -1e-12 || rest > 1 + 1e-12) continue;
        const corner = [p, q];
        corner.splice(axis, 0, Math.min(1, Math.max(0, rest)));
        if (!corners.some((other) => other.every((value, i) => Math.abs(value - corner[i]) < 1e-9))) corners.push(corner);
      }
    }
  }
  return corners.sort((a, b) => angle(a) - angle(b));
}

/** A point of three numbers, seen along (1, 1, 1): class 0 up, 1 down left, 2 down right. */
export const flatten = ([a, b, c]) => [(c - b) / Math.SQRT2, (2 * a - b - c) / Math.sqrt(6)];
const angle = (point) => Math.atan2(...flatten(point).reverse());
