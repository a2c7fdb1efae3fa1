"use strict";
const scene = JSON.parse(document.getElementById("scene").textContent);
const $ = (id) => document.getElementById(id);
const [SEQUENCE, GROUP, DEVICE, FORWARD, BACKWARD, Q, Q_COUNT, K, K_COUNT, POLYGONS] = Array(10).keys();
const STRIP = 0.035; // of the canvas: owners of tokens, beside the matrix
const state = { sequence: 0, group: 0, pass: "forward", step: 0, at: null };
const number = (n) => n.toLocaleString("en");
const size = (n) => (n >= 1e6 ? (n / 1e6).toFixed(1) + " MB" : n >= 1e3 ? (n / 1e3).toFixed(1) + " kB" : n + " B");
const time = (s) => (s >= 1 ? s.toFixed(2) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : (s * 1e6).toFixed(0) + " µs");
const device = (d) => `device ${d} (node ${scene.nodes[d]})`;
const view = () => scene.passes[state.pass];
const division = (tile) => tile[state.pass === "forward" ? FORWARD : BACKWARD];
const shown = () => scene.tiles.filter((t) => t[SEQUENCE] === state.sequence && t[GROUP] === state.group);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function frame() {
  const canvas = $("tiles"), ratio = window.devicePixelRatio || 1, side = canvas.clientWidth;
  canvas.width = canvas.height = Math.round(side * ratio);
  const strip = canvas.width * STRIP;
  const scale = (canvas.width - 2 * strip) / scene.sequences[state.sequence].length;
  return { canvas, context: canvas.getContext("2d"), strip, scale, ratio };
}

function drawTiles() {
  const { canvas, context, strip, scale, ratio } = frame();
  const origin = 2 * strip;
  context.fillStyle = style("--empty");
  context.fillRect(origin, origin, canvas.width, canvas.height);
  for (const [begin, count, owner] of scene.sequences[state.sequence].owners) {
    context.fillStyle = scene.colours[owner];
    context.fillRect(origin + begin * scale, 0, count * scale, strip * 1.4);
    context.fillRect(0, origin + begin * scale, strip * 1.4, count * scale);
  }
  for (const tile of shown()) {
    const done = division(tile) - state.step; // below 0: computed
    context.globalAlpha = done < -1 ? 0.8 : done < 0 ? 1 : 0.13;
    context.fillStyle = context.strokeStyle = scene.colours[tile[DEVICE]];
    context.beginPath();
    if (tile[POLYGONS].length === 0) context.rect(origin + tile[K] * scale, origin + tile[Q] * scale, tile[K_COUNT] * scale, tile[Q_COUNT] * scale);
    for (const polygon of tile[POLYGONS]) {
      for (let i = 0; i < polygon.length; i += 2) context[i ? "lineTo" : "moveTo"](origin + polygon[i + 1] * scale, origin + polygon[i] * scale);
      context.closePath();
    }
    context.fill();
  }
  context.globalAlpha = 1;
  if (state.at) {
    context.strokeStyle = style("--ink");
    context.lineWidth = 2 * ratio;
    context.strokeRect(origin + state.at[K] * scale, origin + state.at[Q] * scale, state.at[K_COUNT] * scale, state.at[Q_COUNT] * scale);
  }
}

function tileAt(event) {
  const { canvas, strip, scale } = frame();
  const box = canvas.getBoundingClientRect(), factor = canvas.width / box.width;
  const k = ((event.clientX - box.left) * factor - 2 * strip) / scale;
  const q = ((event.clientY - box.top) * factor - 2 * strip) / scale;
  return shown().find((t) => t[Q] <= q && q < t[Q] + t[Q_COUNT] && t[K] <= k && k < t[K] + t[K_COUNT]) || null;
}

function readout() {
  const t = state.at, sequence = scene.sequences[state.sequence];
  $("readout").textContent = t
    ? `queries ${number(t[Q])} to ${number(t[Q] + t[Q_COUNT] - 1)}, keys ${number(t[K])} to ${number(t[K] + t[K_COUNT] - 1)}: ` +
      `computed by ${device(t[DEVICE])} in division ${division(t) + 1} of ${state.pass}${t[POLYGONS].length ? ", partly masked" : ""}`
    : `${number(sequence.length)} tokens: queries downwards, keys to the right. The strips say who owns a token. ` +
      "Point at a tile, or go from tile to tile with the arrow keys.";
}

function moveTile(key) {
  const tiles = shown();
  if (!tiles.length) return;
  const middle = (t) => [t[K] + t[K_COUNT] / 2, t[Q] + t[Q_COUNT] / 2];
  if (!state.at) return void (state.at = tiles[0]);
  const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  const [x, y] = middle(state.at);
  let best = null, least = Infinity;
  for (const tile of tiles) {
    const [a, b] = middle(tile), along = (a - x) * dx + (b - y) * dy, across = Math.abs((a - x) * dy) + Math.abs((b - y) * dx);
    if (along > 0 && along + 3 * across < least) [best, least] = [tile, along + 3 * across];
  }
  if (best) state.at = best;
}

function drawBytes() {
  const matrix = view().bytes, most = Math.max(1, ...matrix.flat()), small = matrix.length <= 8;
  let between = 0, inside = 0;
  const rows = matrix.map((row, a) => `<tr><th scope="row">${a}</th>` + row.map((n, b) => {
    const same = scene.nodes[a] === scene.nodes[b];
    if (same) inside += n; else between += n;
    const title = `${device(a)} sends ${size(n)} to ${device(b)}`;
    const ink = n / most > 0.55 ? (document.documentElement.dataset.theme === "dark" ? "#0f1318" : "#fff") : "inherit";
    return `<td class="${same ? "inside" : "between"}" title="${title}" style="background: rgba(${style("--heat")}, ${n / most}); color: ${ink}">${small && n ? size(n) : ""}</td>`;
  }).join("") + "</tr>").join("");
  $("bytes").className = small ? "" : "many";
  $("bytes").innerHTML = `<thead><tr><th scope="col">from \\ to</th>${matrix.map((_, b) => `<th scope="col">${b}</th>`).join("")}</tr></thead><tbody>${rows}</tbody>`;
  $("bytes-text").textContent = `${state.pass} of one layer: ${size(between)} between nodes, ${size(inside)} inside (dashed cells)`;
}

function drawTimeline() {
  const { seconds, spans } = view(), row = 22, left = 70, width = 1000, height = scene.nodes.length * row + 24;
  const x = (t) => left + (t / Math.max(seconds, 1e-12)) * (width - left - 10);
  const marks = [0, 0.25, 0.5, 0.75, 1].map((f) => `<line class="grid" x1="${x(f * seconds)}" x2="${x(f * seconds)}" y1="0" y2="${height - 20}"/>` +
    `<text x="${x(f * seconds)}" y="${height - 6}" text-anchor="${f === 1 ? "end" : "middle"}">${time(f * seconds)}</text>`);
  const names = scene.nodes.map((_, d) => `<text x="0" y="${d * row + 15}">device ${d}</text>`);
  const boxes = spans.map(([d, kind, n, begin, end]) => {
    const attend = kind === "attend", late = attend && n >= state.step;
    const label = attend ? `division ${n + 1}` : kind === "wait" ? `waits for exchange ${n}` : `${kind} ${n}`;
    return `<rect class="${attend ? "attend" : "wait"}${late ? " dim" : ""}" x="${x(begin)}" y="${d * row + 3}" width="${Math.max(x(end) - x(begin), 0.5)}" height="${row - 7}" rx="2"` +
      `${attend ? ` fill="${scene.colours[d]}"` : ""}><title>${device(d)}: ${label}, ${time(begin)} to ${time(end)}</title></rect>`;
  });
  $("timeline").setAttribute("viewBox", `0 0 ${width} ${height}`);
  $("timeline").innerHTML = marks.concat(names, boxes).join("");
}

function draw() {
  const divisions = view().divisions;
  $("step").max = divisions;
  state.step = Math.min(state.step, divisions);
  $("step").value = state.step;
  $("step-text").textContent = `${state.step} of ${divisions}`;
  drawTiles();
  drawBytes();
  drawTimeline();
  readout();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-pressed", String(name === "dark"));
}

function start() {
  $("facts").textContent = `${number(scene.sequences.reduce((n, s) => n + s.length, 0))} tokens in ${scene.sequences.length} sequence${scene.sequences.length > 1 ? "s" : ""} on ` +
    `${scene.nodes.length} devices of ${new Set(scene.nodes).size} node(s); predicted forward ${time(scene.passes.forward.seconds)}, backward ${time(scene.passes.backward.seconds)} per layer`;
  $("sequence").innerHTML = scene.sequences.map((s, i) => `<option value="${i}">${i + 1}: ${number(s.length)} tokens</option>`).join("");
  $("group").innerHTML = Array.from({ length: scene.groups }, (_, g) => `<option value="${g}">${g + 1}</option>`).join("");
  $("group-label").hidden = scene.groups === 1;
  $("group-label").style.display = scene.groups === 1 ? "none" : "";
  $("legend").innerHTML = scene.colours.map((c, d) => `<li><i style="background:${c}"></i>${scene.nodes.length > 16 ? d : device(d)}</li>`).join("");
  for (const id of ["sequence", "group", "pass"]) {
    $(id).addEventListener("change", (event) => {
      state[id] = id === "pass" ? event.target.value : Number(event.target.value);
      if (id === "pass") state.step = view().divisions;
      else state.at = null;
      draw();
    });
  }
  $("step").addEventListener("input", (event) => { state.step = Number(event.target.value); draw(); });
  $("theme").addEventListener("click", () => { theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); draw(); });
  $("tiles").addEventListener("pointermove", (event) => { const at = tileAt(event); if (at !== state.at) { state.at = at; } drawTiles(); readout(); });
  $("tiles").addEventListener("pointerleave", () => { state.at = null; drawTiles(); readout(); });
  $("tiles").addEventListener("keydown", (event) => {
    if (event.key === "Escape") state.at = null;
    else if (event.key.startsWith("Arrow")) moveTile(event.key);
    else return;
    event.preventDefault();
    drawTiles();
    readout();
  });
  window.addEventListener("resize", drawTiles);
  theme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  state.step = view().divisions;
  draw();
}

start();
