"use strict";
// Draws the timeline of `forge trace`. Colours are those of Okabe and Ito (2008), which colour-blind people tell apart.
const DATA = JSON.parse(document.getElementById("data").textContent);
const T = (at) => DATA.texts[at];
const COLOURS = {
  data: "#f0e442", forward: "#0072b2", backward: "#56b4e9", recompute: "#cc79a7", gradients: "#009e73",
  update: "#882255", "in flight": "#e69f00", "waits for a rank": "#d55e00", "waits for bytes": "#999999",
  "critical path": "#000000",
};
const DARK_TEXT = new Set(["data", "backward", "in flight", "waits for bytes", "recompute"]);
const LEFT = 150, LANE = 22, GAP = 14, TOP = 26, LANES = 3, SMALLEST = 5;
const canvas = document.getElementById("lanes"), tip = document.getElementById("tip");
const about = document.getElementById("about");
let from = 0, to = DATA.end, picked = null, showPath = true, leg = -1, boxes = [];

function items() {
  const found = [];
  DATA.ranks.forEach((rank, row) => {
    for (const [a, b, phase, module] of rank.segments)
      found.push({ row, lane: 0, a, b, kind: T(phase), name: T(module) || T(phase),
        text: `${T(module) || "outside of all modules"}\n${T(phase)}` });
    for (const call of rank.calls) {
      const text = describe(rank, call), name = T(call.name);
      found.push({ row, lane: 1, a: call.at[0], b: call.at[1], kind: "in flight", name, text, call });
      for (const [a, b] of call.waits) {
        const ready = call.behind === row || call.behind < 0 ? a : Math.min(Math.max(call.ready, a), b);
        if (ready > a)
          found.push({ row, lane: 2, a, b: ready, kind: "waits for a rank", call,
            name: `rank ${call.behind}`, text: `waits for rank ${call.behind}\n${text}` });
        if (b > ready) found.push({ row, lane: 2, a: ready, b, kind: "waits for bytes", name, text, call });
      }
    }
  });
  return found;
}

function describe(rank, call) {
  return [
    `${T(call.name)}: ${bytes(call.bytes)}, ${T(call.about)}`, `${T(call.ranks)}; seen from ${rank.name}`,
    `by ${T(call.plugin)}, in ${T(call.module) || "no module"} (${T(call.phase)})`, ...call.places.map(T),
  ].join("\n");
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${at ? count.toFixed(1) : count} ${units[at]}`;
}

function time(us) {
  return us >= 1e4 ? `${(us / 1e3).toFixed(1)} ms` : `${us.toFixed(0)} µs`;
}

const ITEMS = items();
const CALLS = ITEMS.filter((one) => one.lane === 1).sort((one, other) => one.a - other.a);
const HEIGHT = TOP + DATA.ranks.length * (LANES * LANE + GAP) + GAP;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const width = () => canvas.clientWidth - LEFT - 8;
const x = (us) => LEFT + ((us - from) / (to - from)) * width();
const y = (row, lane) => TOP + row * (LANES * LANE + GAP) + lane * LANE;

function draw() {
  const scale = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.style.height = `${HEIGHT}px`;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = HEIGHT * scale;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "11px ui-monospace, monospace";
  pen.textBaseline = "middle";
  ruler(pen);
  boxes = [];
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, width() + 8, HEIGHT);
  pen.clip();
  for (const one of ITEMS) if (one.b >= from && one.a <= to) box(pen, one);
  if (showPath) path(pen);
  pen.restore();
  DATA.ranks.forEach((rank, row) => {
    pen.fillStyle = css("--text");
    pen.fillText(rank.name, 4, y(row, 0) + LANE / 2);
    pen.fillStyle = css("--dim");
    ["compute", "communication", "waiting"].forEach((name, lane) => pen.fillText(name, LEFT - 92, y(row, lane) + LANE / 2));
  });
}

function ruler(pen) {
  const step = 10 ** Math.floor(Math.log10((to - from) / 4)), wide = ((to - from) / step > 12 ? 5 : 1) * step;
  for (let at = Math.ceil(from / wide) * wide; at <= to; at += wide) {
    pen.fillStyle = css("--rule");
    pen.fillRect(x(at), TOP - 6, 1, HEIGHT - TOP);
    pen.fillStyle = css("--dim");
    pen.fillText(`${(at / 1e3).toFixed(wide < 1e3 ? 2 : 0)} ms`, x(at) + 3, TOP / 2);
  }
}

function box(pen, one) {
  const a = Math.max(x(one.a), LEFT), b = Math.max(Math.min(x(one.b), canvas.clientWidth), a + 1);
  const top = y(one.row, one.lane) + 1, high = LANE - 3;
  pen.fillStyle = COLOURS[one.kind] || COLOURS.update;
  pen.fillRect(a, top, b - a, high);
  if (picked && (one === picked || (one.call && picked.call && one.call.key === picked.call.key))) {
    pen.strokeStyle = css("--pick");
    pen.lineWidth = one === picked ? 3 : 1.5;
    pen.strokeRect(a, top, b - a, high);
  }
  const room = Math.floor((b - a - 4) / 6.7);
  if (room >= SMALLEST) {
    pen.fillStyle = DARK_TEXT.has(one.kind) ? "#000" : "#fff";
    pen.fillText(one.name.length > room ? `${one.name.slice(0, room - 1)}…` : one.name, a + 3, top + high / 2);
  }
  boxes.push([a, top, b, top + high, one]);
}

function path(pen) {
  pen.strokeStyle = css("--pick");
  pen.lineWidth = 2.5;
  pen.beginPath();
  DATA.path.forEach(([rank, a, b], at) => {
    const level = y(rank, 0) - 3;
    if (at === 0) pen.moveTo(x(a), level);
    else pen.lineTo(x(a), level);
    pen.lineTo(x(b), level);
  });
  pen.stroke();
}

function legend() {
  const seen = new Set(ITEMS.map((one) => one.kind)), place = document.getElementById("legend");
  for (const [name, colour] of Object.entries(COLOURS)) {
    if (!seen.has(name) && name !== "critical path") continue;
    const entry = document.createElement("span"), mark = document.createElement("i");
    mark.style.background = name === "critical path" ? "var(--pick)" : colour;
    entry.append(mark, name === "critical path" ? "critical path (the line)" : name);
    place.append(entry);
  }
}

function move(by) {
  const span = to - from;
  from = Math.max(0, Math.min(DATA.end - span, from + by));
  to = from + span;
  draw();
}

function zoom(factor, around) {
  const span = Math.max(20, Math.min(DATA.end, (to - from) * factor));
  const share = (around - from) / (to - from);
  from = Math.max(0, Math.min(DATA.end - span, around - share * span));
  to = from + span;
  draw();
}

function whole() { from = 0; to = DATA.end; draw(); }

function pick(one) {
  picked = one;
  about.textContent = one ? `${one.text}\n${time(one.a)} to ${time(one.b)}: ${time(one.b - one.a)}` : "";
  if (one && (one.a > to || one.b < from)) move((one.a + one.b) / 2 - (from + to) / 2);
  else draw();
}

function next(by) {
  if (!CALLS.length) return;
  const at = CALLS.findIndex((one) => picked && one.call === picked.call);
  pick(CALLS[(at < 0 ? (by > 0 ? 0 : CALLS.length - 1) : at + by + CALLS.length) % CALLS.length]);
}

function along() {
  leg = (leg + 1) % DATA.path.length;
  const [rank, a, b, kind] = DATA.path[leg];
  picked = ITEMS.find((one) => one.row === rank && one.lane === (T(kind) === "compute" ? 0 : 2) && one.b > a && one.a < b);
  about.textContent = `critical path ${leg + 1} of ${DATA.path.length}: ${T(kind)} on ${DATA.ranks[rank].name}, ` +
    `${time(a)} to ${time(b)}: ${time(b - a)}\n${picked ? picked.text : ""}`;
  if (a > to || b < from) move((a + b) / 2 - (from + to) / 2);
  else draw();
}

function at(event) {
  const place = canvas.getBoundingClientRect(), px = event.clientX - place.left, py = event.clientY - place.top;
  const hit = [...boxes].reverse().find(([a, top, b, bottom]) => px >= a - 1 && px <= b + 1 && py >= top && py <= bottom);
  return { px, us: from + ((px - LEFT) / width()) * (to - from), one: hit ? hit[4] : null };
}

const KEYS = {
  ArrowLeft: () => move((from - to) / 8), ArrowRight: () => move((to - from) / 8), "+": () => zoom(0.6, (from + to) / 2),
  "=": () => zoom(0.6, (from + to) / 2), "-": () => zoom(1.7, (from + to) / 2), 0: whole, Home: whole,
  n: () => next(1), p: () => next(-1), c: along, Escape: () => { leg = -1; pick(null); },
};
let held = null;
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(((event.deltaX || event.deltaY) / width()) * (to - from));
  else zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event).us);
}, { passive: false });
canvas.addEventListener("pointerdown", (event) => { held = { px: at(event).px, moved: false }; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointerup", (event) => { if (held && !held.moved) pick(at(event).one); held = null; });
canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
canvas.addEventListener("pointermove", (event) => {
  const { px, one } = at(event);
  if (held && Math.abs(px - held.px) > 3) held.moved = true;
  if (held && held.moved) { move(((held.px - px) / width()) * (to - from)); held.px = px; }
  tip.style.display = one && !held ? "block" : "none";
  if (!one) return;
  tip.textContent = `${one.text}\n${time(one.b - one.a)}`;
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 340)}px`;
  tip.style.top = `${event.clientY + 16}px`;
});
canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
document.getElementById("in").addEventListener("click", KEYS["+"]);
document.getElementById("out").addEventListener("click", KEYS["-"]);
document.getElementById("all").addEventListener("click", whole);
document.getElementById("path").addEventListener("click", () => { showPath = !showPath; draw(); });
window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
legend();
draw();
