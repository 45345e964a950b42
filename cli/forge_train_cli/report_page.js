"use strict";
// Draws the curves of `forge runs report`. Of a bucket of steps the data has the smallest and the largest value, so
// that no spike is missing, and the mean, which is smoothed.
let DATA = JSON.parse(document.getElementById("data").textContent);
const LEFT = 62, RIGHT = 10, TOP = 8, BOTTOM = 26, NEAR = 28, MARK = 5, FEW = 8;
// Of more curves than there are looks, all but the one pointed at are thin and solid, which is drawn ten times as fast.
const LOOKS = 28;
const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const state = { metrics: new Map(), smooth: 0, across: "step", log: false, clip: false, events: true, zoom: null,
  hidden: new Set(), find: "", picked: null, event: -1 };
let cache = new Map(), charts = new Map(), hovered = null, waiting = false, span = [0, 1];

// -- data ------------------------------------------------------------------------------------------------

function numbers(text, kind) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at += 1) bytes[at] = raw.charCodeAt(at);
  return kind === 4 ? new Float32Array(bytes.buffer) : new Float64Array(bytes.buffer);
}

function sums(differences) {
  const steps = new Float64Array(differences.length);
  let step = 0;
  for (let at = 0; at < steps.length; at += 1) steps[at] = step += differences[at];
  return steps;
}

// The curves of a metric, each with steps `x`, values `y`, and steps and values to smooth, `at` and `mean`.
function curves(metric) {
  if (!cache.has(metric)) cache.set(metric, (DATA.metrics[metric] || []).map((one) => {
    const x = sums(one.x), y = numbers(one.y, 8);
    return { run: one.run, x, y, at: one.at ? sums(one.at) : x, mean: one.mean ? numbers(one.mean, 4) : y };
  }));
  return cache.get(metric);
}

// Where steps lie on the axis: as they are, as the tokens that their run had seen, or the logarithm of either.
function placed(curve, name) {
  const key = `${name} ${state.across} ${state.log}`;
  if (curve.key !== key) {
    curve.key = key;
    curve.places = {};
  }
  if (!curve.places[name]) {
    let found = curve[name];
    if (state.across === "tokens") {
      const known = curves("tokens").find((one) => one.run === curve.run);
      found = found.map((step) => (known ? between(known.x, known.y, step) : NaN));
    }
    curve.places[name] = state.log ? found.map((one) => (one > 0 ? Math.log10(one) : -Infinity)) : found;
  }
  return curve.places[name];
}

function between(x, y, at) {
  const next = Math.min(Math.max(first(x, at), 1), x.length - 1);
  if (x.length === 1) return y[0] * (at / x[0]);
  return y[next - 1] + ((at - x[next - 1]) / (x[next] - x[next - 1])) * (y[next] - y[next - 1]);
}

// The first index whose value is not below `value`.
function first(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

const seen = (run) => !state.hidden.has(DATA.runs[run].name) && DATA.runs[run].name.toLowerCase().includes(state.find);
const visible = (metric) => curves(metric).filter((one) => seen(one.run));

function whole() {
  let low = Infinity, high = -Infinity;
  for (const metric of state.metrics.keys())
    for (const curve of visible(metric))
      for (const at of [...placed(curve, "x").slice(0, 2), ...placed(curve, "x").slice(-1)])
        if (Number.isFinite(at)) { low = Math.min(low, at); high = Math.max(high, at); }
  return high > low ? [low, high] : Number.isFinite(low) ? [low - 0.5, low + 0.5] : [0, 1];
}

// -- drawing ---------------------------------------------------------------------------------------------

// An exponential moving average there and back, which lags in neither direction.
function smoothed(curve, range) {
  const at = placed(curve, "at"), tau = ((range[1] - range[0]) * state.smooth) / 1000, found = Float64Array.from(curve.mean);
  for (const back of [false, true]) {
    let mean = NaN, last = NaN;
    for (let count = 0; count < at.length; count += 1) {
      const index = back ? at.length - 1 - count : count, value = found[index];
      if (Number.isFinite(value) && Number.isFinite(at[index])) {
        mean = Number.isFinite(mean) ? mean + (value - mean) * (1 - Math.exp(-Math.abs(at[index] - last) / tau)) : value;
        last = at[index];
      }
      found[index] = mean;
    }
  }
  return found;
}

function heights(lines, log) {
  const all = [];
  for (const { x, y } of lines)
    for (let index = first(x, span[0]); index < x.length && x[index] <= span[1]; index += 1)
      if (Number.isFinite(y[index])) all.push(y[index]);
  if (!all.length) return null;
  const sorted = state.clip ? Float64Array.from(all).sort() : null;
  let low = Infinity, high = -Infinity;
  if (sorted) [low, high] = [sorted[Math.floor(all.length * 0.02)], sorted[Math.ceil(all.length * 0.98) - 1]];
  else for (const one of all) { low = Math.min(low, one); high = Math.max(high, one); }
  const margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || (log ? 0.1 : 1);
  return [low - margin, high + margin];
}

function draw(chart) {
  const { canvas, metric } = chart, scale = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  const width = canvas.clientWidth, height = canvas.clientHeight, log = state.metrics.get(metric);
  canvas.width = width * scale;
  canvas.height = height * scale;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  const up = (value) => (log ? (value > 0 ? Math.log10(value) : NaN) : value);
  const raw = visible(metric).map((curve) => ({ curve, x: placed(curve, "x"), y: log ? curve.y.map(up) : curve.y }));
  const lines = state.smooth
    ? raw.map(({ curve }) => ({ curve, x: placed(curve, "at"), y: smoothed(curve, span).map(up) })) : raw;
  const range = heights(state.smooth && state.clip ? lines : raw, log);
  chart.lines = lines;
  chart.marks = [];
  pen.font = "11px system-ui, sans-serif";
  if (!range) {
    pen.fillStyle = css("--dim");
    pen.fillText("no values here", LEFT, height / 2);
    chart.px = null;
    return;
  }
  const px = (at) => LEFT + ((at - span[0]) / (span[1] - span[0])) * (width - LEFT - RIGHT);
  const py = (value) => height - BOTTOM - ((value - range[0]) / (range[1] - range[0])) * (height - TOP - BOTTOM);
  Object.assign(chart, { px, py, log });
  axes(pen, chart, range, width, height);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT - MARK, TOP - 4, width - LEFT - RIGHT + 2 * MARK, height - TOP - BOTTOM + 8);
  pen.clip();
  const lit = hovered === null ? state.picked : hovered;
  const last = (one) => one.curve.run === lit;
  const thin = lines.length > LOOKS ? 1 / scale : 0;
  if (state.smooth) for (const one of raw) stroke(pen, chart, one, last(one) ? 0.35 : lit === null ? 0.22 : 0.06, thin || 1, thin);
  for (const one of [...lines].sort((a, b) => last(a) - last(b)))
    stroke(pen, chart, one, lit === null || last(one) ? 1 : 0.15, last(one) ? 2.6 : thin || 1.5, thin && !last(one));
  for (const one of raw) gaps(pen, chart, one, lit === null || last(one) ? 1 : 0.15);
  if (state.events) for (const one of raw) if (lit === null ? raw.length <= FEW : last(one)) marks(pen, chart, one);
  pen.restore();
  if (chart.drag && !chart.drag.pans && chart.drag.moved) {
    pen.fillStyle = `${css("--focus")}33`;
    pen.fillRect(Math.min(chart.drag.from, chart.drag.to), TOP, Math.abs(chart.drag.to - chart.drag.from), height - TOP - BOTTOM);
  }
}

function stroke(pen, { px, py }, { curve, x, y }, alpha, wide, solid) {
  const run = DATA.runs[curve.run], from = Math.max(first(x, span[0]) - 1, 0), to = Math.min(first(x, span[1]) + 1, x.length);
  pen.globalAlpha = alpha;
  pen.strokeStyle = pen.fillStyle = run.colour;
  pen.lineWidth = wide;
  pen.lineJoin = "round";
  pen.setLineDash(solid ? [] : run.dash);
  pen.beginPath();
  let length = 0;
  for (let index = from; index <= to; index += 1) {
    const there = index < to && Number.isFinite(x[index]) && Number.isFinite(y[index]);
    if (there && length) pen.lineTo(px(x[index]), py(y[index]));
    else if (there) pen.moveTo(px(x[index]), py(y[index]));
    else if (length === 1) pen.rect(px(x[index - 1]) - 1, py(y[index - 1]) - 1, 2, 2); // a line of one point is invisible
    length = there ? length + 1 : 0;
  }
  pen.stroke();
  pen.setLineDash([]);
  pen.globalAlpha = 1;
}

// A cross at the top where a value was not finite.
function gaps(pen, { px }, { curve, x }, alpha) {
  pen.globalAlpha = alpha;
  pen.strokeStyle = DATA.runs[curve.run].colour;
  pen.lineWidth = 2;
  for (let index = first(x, span[0]); index < x.length && x[index] <= span[1]; index += 1) {
    if (!Number.isNaN(curve.y[index])) continue;
    const at = px(x[index]);
    pen.beginPath();
    pen.moveTo(at - 4, TOP); pen.lineTo(at + 4, TOP + 8);
    pen.moveTo(at + 4, TOP); pen.lineTo(at - 4, TOP + 8);
    pen.stroke();
  }
  pen.globalAlpha = 1;
}

function marks(pen, chart, { curve, x, y }) {
  DATA.events.forEach(([run, step, kind, text], number) => {
    if (run !== curve.run) return;
    const [at] = placed({ run, one: Float64Array.of(step), places: {} }, "one");
    if (!(at >= span[0] && at <= span[1])) return;
    const level = between(x, y, at), a = chart.px(at), b = chart.py(Number.isFinite(level) ? level : 0);
    if (!Number.isFinite(b)) return;
    const wide = number === state.event ? 2 * MARK : MARK;
    pen.fillStyle = css("--back");
    pen.strokeStyle = DATA.runs[run].colour;
    pen.lineWidth = 2;
    pen.beginPath();
    if (kind === "checkpoint") pen.rect(a - wide / 2, b - wide / 2, wide, wide);
    else if (kind === "anomaly") { pen.moveTo(a, b - wide); pen.lineTo(a + wide, b + wide); pen.lineTo(a - wide, b + wide); pen.closePath(); }
    else pen.arc(a, b, wide, 0, 7);
    pen.fill();
    pen.stroke();
    chart.marks.push([a, b, `${DATA.runs[run].name}, step ${step.toLocaleString("en")}\n${text}`]);
  });
}

function axes(pen, chart, range, width, height) {
  pen.textBaseline = "middle";
  pen.lineWidth = 1;
  pen.textAlign = "right";
  for (const at of ticks(range, chart.log, (height - TOP - BOTTOM) / 40)) {
    pen.fillStyle = css("--rule");
    pen.fillRect(LEFT, chart.py(at), width - LEFT - RIGHT, 1);
    pen.fillStyle = css("--dim");
    pen.fillText(short(chart.log ? 10 ** at : at, range, chart.log), LEFT - 6, chart.py(at));
  }
  pen.textAlign = "center";
  let edge = -Infinity;
  for (const at of ticks(span, state.log, (width - LEFT - RIGHT) / 80)) {
    const text = short(state.log ? 10 ** at : at, span, state.log), wide = pen.measureText(text).width, x = chart.px(at);
    if (x - wide / 2 < edge + 8 || x + wide / 2 > width - 34) continue;
    edge = x + wide / 2;
    pen.fillText(text, x, height - BOTTOM / 2);
  }
  pen.textAlign = "right";
  pen.fillText(state.across === "step" ? "step" : "tokens", width - 2, height - BOTTOM / 2);
}

function ticks([low, high], log, most) {
  const found = [];
  if (log && high - low >= 1) {
    const apart = Math.max(Math.ceil((high - low) / most), 1);
    for (let power = Math.ceil(low); power <= high; power += 1) if (power % apart === 0) found.push(power);
    if (found.length > 1) return found;
  }
  if (log && high - low < 12) return ticks([10 ** low, 10 ** high], false, most).filter((one) => one > 0).map(Math.log10);
  const unit = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = unit * ([1, 2, 5].find((factor) => (high - low) / (unit * factor) <= most) || 10);
  for (let count = Math.ceil(low / step); count <= high / step && found.length < 50; count += 1) found.push(count * step);
  return found;
}

function short(value, range, log) {
  const size = Math.abs(value), wide = log ? size : Math.max(Math.abs(range[0]), Math.abs(range[1]));
  if (value === 0) return "0";
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit && size < 1e15) return `${parseFloat((value / unit).toPrecision(6))}${letter}`;
  return wide < 1e-3 || wide >= 1e15 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(parseFloat(value.toPrecision(6)));
}

// -- what is shown ---------------------------------------------------------------------------------------

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; now(); });
}

function now() {
  span = state.zoom || whole();
  charts.forEach(draw);
  document.querySelectorAll("[data-row]").forEach((row) => {
    const name = DATA.runs[row.dataset.row].name;
    row.classList.toggle("off", !seen(Number(row.dataset.row)));
    row.classList.toggle("picked", Number(row.dataset.row) === state.picked);
    row.querySelector("input").checked = !state.hidden.has(name);
  });
  remember();
}

// The view is kept behind the # of the address, so that a page that is opened again, or by somebody else, shows it.
function remember() {
  const view = { m: Object.fromEntries([...state.metrics].map(([name, log]) => [name, Number(log)])), s: state.smooth,
    x: state.across, l: Number(state.log), c: Number(state.clip), e: Number(state.events), z: state.zoom,
    h: [...state.hidden], f: state.find };
  try { history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(view))}`); } catch { /* a frame may forbid it */ }
}

function recall() {
  for (const name of DATA.shown) state.metrics.set(name, DATA.logarithmic.includes(name));
  if (!state.metrics.size && Object.keys(DATA.metrics).length) state.metrics.set(Object.keys(DATA.metrics)[0], false);
  try {
    const view = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    const metrics = Object.entries(view.m).filter(([name]) => name in DATA.metrics).map(([name, log]) => [name, Boolean(log)]);
    Object.assign(state, { metrics: new Map(metrics), smooth: Number(view.s), across: view.x === "tokens" ? "tokens" : "step",
      log: Boolean(view.l), clip: Boolean(view.c), events: Boolean(view.e), hidden: new Set(view.h), find: String(view.f),
      zoom: Array.isArray(view.z) && view.z.length === 2 && view.z.every(Number.isFinite) ? view.z : null });
  } catch { /* no view */ }
  Object.assign($("smooth"), { value: state.smooth });
  $("across").value = state.across;
  $("find").value = state.find;
  for (const name of ["log", "clip", "events"]) $(name).checked = state[name];
}

function choices() {
  $("choice").replaceChildren(...Object.keys(DATA.metrics).map((name) => box(name, state.metrics.has(name), (on) => {
    if (on) state.metrics.set(name, DATA.logarithmic.includes(name));
    else state.metrics.delete(name);
    figures();
    redraw();
  })));
}

function box(text, on, change) {
  const label = document.createElement("label"), input = document.createElement("input");
  Object.assign(input, { type: "checkbox", checked: on });
  input.addEventListener("change", () => change(input.checked));
  label.append(input, ` ${text}`);
  label.title = text;
  return label;
}

function figures() {
  const wanted = Object.keys(DATA.metrics).filter((name) => state.metrics.has(name));
  for (const name of charts.keys()) if (!wanted.includes(name)) charts.delete(name);
  for (const name of wanted) if (!charts.has(name)) charts.set(name, figure(name));
  $("charts").replaceChildren(...wanted.map((name) => charts.get(name).figure));
}

function figure(metric) {
  const made = document.createElement("figure"), caption = document.createElement("figcaption"), name = document.createElement("b");
  const canvas = document.createElement("canvas"), chart = { metric, canvas, figure: made, lines: [], marks: [], drag: null };
  name.textContent = metric;
  caption.append(name, box("log", state.metrics.get(metric), (on) => { state.metrics.set(metric, on); redraw(); }));
  Object.assign(canvas, { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${metric} by ${state.across}`);
  canvas.setAttribute("aria-describedby", "help about");
  made.append(caption, canvas);
  listen(chart);
  return chart;
}

// -- pointer and keys ------------------------------------------------------------------------------------

const limits = (from, to) => { const [low, high] = whole(), wide = high - low; return [Math.max(from, low - wide), Math.min(to, high + wide)]; };

function zoom(factor, around) {
  const [from, to] = span, share = (around - from) / (to - from), wide = (to - from) * factor;
  const [low, high] = whole();
  if (wide >= high - low) return everything();
  if (wide < Math.max(Math.abs(from), Math.abs(to)) * 1e-12) return undefined;
  state.zoom = limits(around - share * wide, around + (1 - share) * wide);
  return redraw();
}

function move(by) {
  const [low, high] = whole(), wide = span[1] - span[0], from = Math.min(Math.max(span[0] + by, low), Math.max(high - wide, low));
  state.zoom = [from, from + wide];
  redraw();
}

function everything() { state.zoom = null; redraw(); }

function pick(run) {
  state.picked = run;
  $("about").textContent = run === null ? "" : `Picked: ${DATA.runs[run].name}`;
  redraw();
}

function next(by) {
  const found = DATA.runs.map((_, run) => run).filter(seen);
  if (!found.length) return;
  const at = found.indexOf(state.picked);
  pick(found[at < 0 ? (by > 0 ? 0 : found.length - 1) : (at + by + found.length) % found.length]);
}

function nextEvent() {
  const found = DATA.events.map((one, number) => [number, ...one]).filter(([, run]) => seen(run) && (state.picked === null || run === state.picked));
  if (!found.length) { $("about").textContent = "There are no events."; return; }
  const [number, run, step, , text] = found.find(([one]) => one > state.event) || found[0];
  Object.assign(state, { event: number, picked: run });
  const [at] = placed({ run, one: Float64Array.of(step), places: {} }, "one");
  if (Number.isFinite(at) && (at < span[0] || at > span[1])) move(at - (span[0] + span[1]) / 2);
  $("about").textContent = `${DATA.runs[run].name}, step ${step.toLocaleString("en")}: ${text}`;
  redraw();
}

function nearest(chart, x, y) {
  let best = null;
  if (!chart.px) return best;
  for (const mark of chart.marks) {
    const far = Math.hypot(mark[0] - x, mark[1] - y);
    if (far < 9 && (!best || far < best.far)) best = { far, text: mark[2], run: null };
  }
  if (best) return best;
  for (const line of chart.lines) {
    let near = null;
    const middle = first(line.x, span[0] + ((x - LEFT) / (chart.canvas.clientWidth - LEFT - RIGHT)) * (span[1] - span[0]));
    for (let index = Math.max(middle - 12, 0); index < Math.min(middle + 12, line.x.length); index += 1) {
      const far = Math.hypot(chart.px(line.x[index]) - x, chart.py(line.y[index]) - y);
      if (!near || far < near.far) near = { far, index };
    }
    if (near && near.far < NEAR && (!best || near.far < best.far)) {
      const { curve } = line, steps = state.smooth ? curve.at : curve.x, value = line.y[near.index];
      best = { far: near.far, run: curve.run, text: `${DATA.runs[curve.run].name}\nstep ${steps[near.index].toLocaleString("en")}: ` +
        `${parseFloat((chart.log ? 10 ** value : value).toPrecision(7))}${state.smooth ? " (smoothed)" : ""}` };
    }
  }
  return best;
}

function tip(found, event) {
  const place = $("tip");
  place.style.display = found ? "block" : "none";
  if (!found) return;
  place.textContent = found.text;
  place.style.left = `${Math.max(Math.min(event.clientX + 14, window.innerWidth - place.offsetWidth - 8), 0)}px`;
  place.style.top = `${Math.max(Math.min(event.clientY + 16, window.innerHeight - place.offsetHeight - 8), 0)}px`;
}

const KEYS = {
  ArrowLeft: () => move((span[0] - span[1]) / 8), ArrowRight: () => move((span[1] - span[0]) / 8),
  "+": () => zoom(0.6, (span[0] + span[1]) / 2), "=": () => KEYS["+"](), "-": () => zoom(1 / 0.6, (span[0] + span[1]) / 2),
  0: everything, Home: everything, n: () => next(1), p: () => next(-1), e: nextEvent,
  Escape: () => { state.event = -1; pick(null); },
};

function listen(chart) {
  const { canvas } = chart;
  const spot = (event) => { const place = canvas.getBoundingClientRect(); return [event.clientX - place.left, event.clientY - place.top]; };
  const at = (x) => span[0] + ((x - LEFT) / (canvas.clientWidth - LEFT - RIGHT)) * (span[1] - span[0]);
  canvas.addEventListener("wheel", (event) => {
    if (document.activeElement !== canvas && !event.ctrlKey) return; // the page scrolls
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(((event.deltaX || event.deltaY) / canvas.clientWidth) * (span[1] - span[0]));
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, at(spot(event)[0]));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    const [x] = spot(event);
    chart.drag = { from: x, to: x, pans: event.shiftKey || event.button === 1, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = spot(event), { drag } = chart;
    if (drag) {
      if (drag.pans) { move(at(drag.to) - at(x)); drag.moved = true; }
      else drag.moved = drag.moved || Math.abs(x - drag.from) > 4;
      drag.to = x;
      redraw();
      return;
    }
    const found = nearest(chart, x, y), run = found ? found.run : null;
    tip(found, event);
    if (run !== hovered) { hovered = run; redraw(); }
  });
  canvas.addEventListener("pointerup", (event) => {
    const { drag } = chart, [x, y] = spot(event);
    chart.drag = null;
    if (drag && drag.moved && !drag.pans) state.zoom = [Math.min(at(drag.from), at(x)), Math.max(at(drag.from), at(x))];
    else if (drag && !drag.moved) { const found = nearest(chart, x, y); pick(found && found.run !== state.picked ? found.run : null); }
    redraw();
  });
  canvas.addEventListener("pointercancel", () => { chart.drag = null; redraw(); });
  canvas.addEventListener("pointerleave", (event) => { tip(null, event); if (hovered !== null) { hovered = null; redraw(); } });
  canvas.addEventListener("dblclick", everything);
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
}

for (const name of ["log", "clip", "events"])
  $(name).addEventListener("change", () => { state[name] = $(name).checked; if (name === "log") state.zoom = null; redraw(); });
$("smooth").addEventListener("input", () => { state.smooth = Number($("smooth").value); redraw(); });
$("across").addEventListener("change", () => { state.across = $("across").value; state.zoom = null; redraw(); });
$("find").addEventListener("input", () => { state.find = $("find").value.toLowerCase(); redraw(); });
$("in").addEventListener("click", KEYS["+"]);
$("out").addEventListener("click", KEYS["-"]);
$("all").addEventListener("click", everything);
$("runs").addEventListener("change", (event) => {
  const run = DATA.runs[event.target.dataset.run];
  if (!run) return;
  if (event.target.checked) state.hidden.delete(run.name);
  else state.hidden.add(run.name);
  redraw();
});
$("runs").addEventListener("click", (event) => {
  if (event.target.id === "none") DATA.runs.forEach((run) => state.hidden.add(run.name));
  if (event.target.id === "every") { state.hidden.clear(); state.find = $("find").value = ""; }
  if (event.target.id === "none" || event.target.id === "every") redraw();
});
$("runs").addEventListener("pointerover", (event) => {
  const row = event.target.closest("[data-row]"), run = row ? Number(row.dataset.row) : null;
  if (run !== hovered) { hovered = run; redraw(); }
});
$("runs").addEventListener("pointerleave", () => { hovered = null; redraw(); });
window.addEventListener("resize", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

// -- following -------------------------------------------------------------------------------------------

window.forgeReport = (newer) => { // called by the script beside a page that is followed
  const open = new Set([...document.querySelectorAll("#tables details[open]")].map((one) => one.id));
  const known = new Set([...document.querySelectorAll("#tables details")].map((one) => one.id));
  const focus = document.activeElement && document.activeElement.dataset.run;
  const before = Object.keys(DATA.metrics).join();
  DATA = newer;
  cache = new Map();
  $("runs").innerHTML = newer.runs_table;
  $("tables").innerHTML = newer.tables;
  for (const one of document.querySelectorAll("#tables details")) if (known.has(one.id)) one.open = open.has(one.id);
  if (focus !== undefined && focus !== null) document.querySelector(`[data-run="${focus}"]`).focus();
  if (Object.keys(DATA.metrics).join() !== before) {
    for (const name of DATA.shown) if (!before.split(",").includes(name)) state.metrics.set(name, DATA.logarithmic.includes(name));
    choices();
    figures();
  }
  redraw();
};

function ask() {
  const script = document.createElement("script");
  script.src = `${encodeURI(document.body.dataset.beside)}?${Date.now()}`;
  script.onload = script.onerror = () => { script.remove(); setTimeout(ask, 4000); };
  document.body.append(script);
}

recall();
choices();
figures();
now();
if (document.body.dataset.beside) ask();
