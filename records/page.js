"use strict";
const tracks = JSON.parse(document.getElementById("curves").textContent);
const LEFT = 52, RIGHT = 14, TOP = 12, BOTTOM = 40, HEIGHT = 340, MOST_TOLD = 6;
const FIRST_PART = 0.2;  // of the steps, whose losses are far above the rest and would flatten it

// ---- Drawing ---------------------------------------------------------------------------------------

function svgElement(parent, name, attributes, text) {
  const element = parent.appendChild(document.createElementNS(parent.namespaceURI, name));
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Round numbers between low and high, about so many.
function ticks(low, high, about, log) {
  if (log) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const factor of [1, 2, 5]) found.push(Number((factor * 10 ** power).toPrecision(1)));
    const inside = found.filter(value => value >= low && value <= high);
    if (inside.length > 1) return inside;
  }
  const rough = (high - low) / Math.max(about, 1), size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * size).find(size => size >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i <= Math.floor(high / step); i++) found.push(Number((i * step).toPrecision(10)));
  return found;
}

function axis(low, high, from, to, log) {
  const scale = log ? Math.log : value => value;
  const span = scale(high) - scale(low) || 1;
  return value => from + (scale(value) - scale(low)) / span * (to - from);
}

// An exponential mean over the points, as other tools have it.
function smoothed(points, weight) {
  let sum = 0, total = 0;
  return points.map(point => {
    sum = sum * weight + point[2];
    total = total * weight + 1;
    return [point[0], point[1], sum / total];
  });
}

function largest(values) {
  return values.reduce((a, b) => Math.max(a, b), -Infinity);
}

function lastPart(points, from) {
  const end = largest(points.map(point => point[0]));
  return points.filter(point => point[0] >= from * end);
}

// The lowest and the highest loss to show.
function viewOf(losses, log) {
  const low = -largest(losses.map(loss => -loss)), high = largest(losses);
  const margin = 0.06 * (high - low) || 0.1;
  return [log ? Math.max(low - margin, low / 2, 1e-3) : low - margin, high + margin];
}

function draw(figure, track, options) {
  const svg = figure.querySelector("svg"), column = figure.dataset.x === "step" ? 0 : 1;
  const width = Math.max(svg.clientWidth, 240);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren();
  const known = point => point[column] !== null && point[2] !== null && (!options.logX || point[column] > 0);
  const shown = track.lines.map((line, i) => options.hidden.has(i) ? [] : line.at.filter(known));
  const training = track.lines.map((line, i) => shown[i].length ? line.training.filter(known) : []);
  const late = track.lines.flatMap((_, i) => lastPart([...training[i], ...shown[i]], options.from));
  const xs = (options.from > FIRST_PART || options.logX ? late : shown.flat()).map(point => point[column]);
  const goals = track.target === null ? [] : [track.target];
  const end = largest(xs) || 1, start = options.from > FIRST_PART || options.logX ? -largest(xs.map(x => -x)) : 0;
  const [low, high] = viewOf([...late.map(point => point[2]), ...goals], options.logY);
  const x = axis(start === end ? end / 2 : start, end, LEFT, width - RIGHT, options.logX);
  const y = axis(low, high, HEIGHT - BOTTOM, TOP, options.logY);
  drawAxes(svg, width, x, y, [start, end, low, high], column, options);
  const id = `clip-${figure.dataset.x}-${figure.closest("section").dataset.track}`;
  const clip = svgElement(svg, "clipPath", {id});
  svgElement(clip, "rect", {x: LEFT, y: TOP, width: width - LEFT - RIGHT + 8, height: HEIGHT - TOP - BOTTOM});
  const plot = svgElement(svg, "g", {"clip-path": `url(#${id})`});
  const points = list => list.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join(" ");
  const lines = track.lines.map((line, i) => {
    const at = shown[i].map(point => [x(point[column]), y(point[2]), point]);
    const group = svgElement(plot, "g", {class: "line", style: `stroke:${line.colour}`});
    if (!at.length) return {line, group, at};
    const edge = sign => shown[i].map(p => [x(p[column]), y(Math.max(p[2] + sign * (p[3] ?? 0), low / 2))]);
    svgElement(group, "polygon", {points: points([...edge(1), ...edge(-1).reverse()]), style: `fill:${line.colour}`});
    if (training[i].length) {
      const smooth = smoothed(training[i], options.smooth).map(p => [x(p[column]), y(p[2])]);
      svgElement(group, "polyline", {class: "training", points: points(smooth)});
    }
    const lone = at.length === 1;  // a line with one point would not be seen
    svgElement(group, "polyline", {class: lone ? "lone" : "mean", points: points(lone ? [at[0], at[0]] : at)});
    return {line, group, at};
  });
  for (const goal of goals) {
    svgElement(svg, "line", {class: "target", x1: LEFT, x2: width - RIGHT, y1: y(goal), y2: y(goal)});
    svgElement(svg, "text", {class: "target", x: width - RIGHT - 4, y: y(goal) - 5}, `target ${goal}`);
  }
  const hair = svgElement(svg, "line", {class: "hair", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
  answerPointer(figure, svg, lines, hair);
}

function drawAxes(svg, width, x, y, [start, end, low, high], column, options) {
  let last = Infinity;
  for (const value of ticks(low, high, 6, options.logY)) {
    const at = y(value);
    if (last - at < 16) continue;
    last = at;
    svgElement(svg, "line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at});
    svgElement(svg, "text", {class: "y", x: LEFT - 8, y: at + 4}, value);
  }
  last = -Infinity;
  for (const value of ticks(start, end, width / 70, options.logX)) {
    const at = x(value), half = 4 * String(value).length;
    if (at - half < last || at + half > width) continue;
    last = at + half + 8;
    svgElement(svg, "text", {class: "x", x: at, y: HEIGHT - BOTTOM + 18}, value);
  }
  const label = column ? "training time [s]" : "step";
  svgElement(svg, "text", {class: "x", x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 4}, label);
}

// ---- At the pointer: the nearest curves, marked and told in the upper right corner, which losses that fall leave free

function answerPointer(figure, svg, lines, hair) {
  const tip = figure.querySelector(".tip");
  const dots = [];
  function show(event) {
    const box = svg.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const near = lines.filter(({at}) => at.length).map(entry => {
      const point = entry.at.reduce((a, b) => Math.abs(b[0] - px) < Math.abs(a[0] - px) ? b : a);
      return {...entry, point, away: Math.hypot(point[0] - px, point[1] - py)};
    });
    near.sort((a, b) => a.away - b.away);
    const told = near.slice(0, box.width < 500 ? 2 : MOST_TOLD).sort((a, b) => a.point[1] - b.point[1]);
    svg.classList.toggle("pointed", lines.length > MOST_TOLD);
    for (const {group} of lines) group.classList.toggle("near", told.some(entry => entry.group === group));
    dots.splice(0).forEach(dot => dot.remove());
    tip.replaceChildren();
    for (const {line, point} of told) {
      const dot = {r: 4, cx: point[0], cy: point[1], style: `fill:${line.colour}`};
      if (point[1] >= 0 && point[0] >= LEFT) dots.push(svgElement(svg, "circle", dot));
      const row = tip.appendChild(document.createElement("div"));
      row.appendChild(document.createElement("i")).style.background = line.colour;
      row.append(`${line.name}: ${describe(point[2])}`);
    }
    if (near.length > told.length) {
      tip.appendChild(document.createElement("div")).append(`the nearest of ${near.length}`);
    }
    hair.setAttribute("x1", px);
    hair.setAttribute("x2", px);
    hair.setAttribute("visibility", "visible");
    tip.hidden = !told.length;
  }
  function hide() {
    tip.hidden = true;
    svg.classList.remove("pointed");
    hair.setAttribute("visibility", "hidden");
    dots.splice(0).forEach(dot => dot.remove());
  }
  svg.onpointermove = svg.onpointerdown = show;
  svg.onpointerleave = hide;
}

function describe([step, seconds, loss, spread]) {
  const noise = spread === null ? "" : ` ± ${spread.toFixed(4)}`;
  return `${loss.toFixed(4)}${noise} at step ${step}${seconds === null ? "" : `, ${seconds.toFixed(2)} s`}`;
}

// ---- The table: sorting and hiding -------------------------------------------------------------------

function makeSortable(table) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const order = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const value = row => Number(row.cells[column].dataset.value ?? NaN);
    const rows = [...body.rows].sort((a, b) => {
      const [one, other] = [value(a), value(b)];
      if (isNaN(one) || isNaN(other)) return isNaN(one) - isNaN(other);
      return order * (one - other);
    });
    body.append(...rows);
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order > 0 ? "ascending" : "descending");
  }));
}

for (const section of document.querySelectorAll("section[data-track]")) {
  const track = tracks[section.dataset.track], rows = [...section.querySelectorAll("tbody tr")];
  const boxes = rows.map(row => row.querySelector("input")), figures = section.querySelectorAll("figure");
  const options = {logX: false, logY: false, smooth: 0, from: FIRST_PART, hidden: new Set()};
  const redraw = () => figures.forEach(figure => draw(figure, track, options));
  makeSortable(section.querySelector("table"));
  boxes.forEach((box, i) => box.addEventListener("change", () => {
    box.checked ? options.hidden.delete(i) : options.hidden.add(i);
    redraw();
  }));
  section.querySelectorAll("[data-show]").forEach(button => button.addEventListener("click", () => {
    const all = button.dataset.show === "all";
    boxes.forEach((box, i) => { box.checked = all; all ? options.hidden.delete(i) : options.hidden.add(i); });
    redraw();
  }));
  const control = (name, event, set) => section.querySelector(`[data-${name}]`).addEventListener(event, ({target}) => {
    set(target);
    redraw();
  });
  control("log=x", "change", box => { options.logX = box.checked; });
  control("log=y", "change", box => { options.logY = box.checked; });
  control("smooth", "input", slider => { options.smooth = Number(slider.value); });
  control("from", "change", choice => { options.from = Number(choice.value); });
  new ResizeObserver(redraw).observe(figures[0]);
  redraw();
}

// A link to a diff opens it.
function openTarget() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target && "open" in target) target.open = true;
}
addEventListener("hashchange", openTarget);
openTarget();
