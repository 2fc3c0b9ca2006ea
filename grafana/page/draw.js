"use strict";
// Drawing: series in, elements out. Names and labels enter the page as text nodes only.

const $ = (id) => document.getElementById(id);
const SVG = new Set(["svg", "g", "path", "line", "rect", "text", "title"]);
const PLOTS = new Map(); // box of a panel -> its plot, for the one cross-hair
const MOST_ROWS = 24; // of the cross-hair's values; a screen holds no more

function el(tag, attributes = {}, ...children) {
  const node = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--") || name === "width%") node.style.setProperty(name.replace("%", ""), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null));
  return node;
}
const SHADES = { dark: "68%, black", light: "70%, white" };
function colour(name) {
  const [, shade, hue] = /^(?:semi-|super-)?(dark|light)-(\w+)$/.exec(name ?? "") ?? [];
  return shade ? `color-mix(in oklab, var(--${hue}) ${SHADES[shade]})` : !name || name.startsWith("#") ? name : `var(--${name})`;
}
const series_colour = (index) => `var(--s${index % 12})`;

// Numbers: unit of Grafana -> base of its prefixes (0: none) and symbol
const PREFIXES = { 0: [""], 1000: ["", "k", "M", "G", "T", "P"], 1024: ["", "Ki", "Mi", "Gi", "Ti", "Pi"] };
const UNITS = {
  short: [1000, ""], bytes: [1024, "B"], binBps: [1024, "B/s"], watt: [1000, "W"], kwatth: [1000, "kWh"], celsius: [0, "°C"],
};
const DURATIONS = ["s", "dtdhms"];
const two = (n) => String(n).padStart(2, "0");
const fixed = (n, decimals) => decimals == null && n > 0 && n < 0.001 ? n.toExponential(1) : n.toFixed(Math.min(decimals ?? (n >= 100 || n % 1 === 0 ? 0 : n >= 10 ? 1 : n >= 0.01 ? 2 : 4), 9));

function duration(seconds, decimals) {
  if (seconds < 0) return "-" + duration(-seconds, decimals);
  if (seconds < 1) return seconds === 0 ? "0 s" : fixed(seconds * 1000, decimals) + " ms";
  if (seconds < 59.5) return fixed(seconds, decimals ?? (seconds < 10 ? 1 : 0)).replace(/\.0$/, "") + " s";
  const minutes = Math.round(seconds / 60);
  if (seconds < 3570) return `${Math.floor(seconds / 60)}m ${two(Math.floor(seconds % 60))}s`;
  return minutes < 1440 ? `${Math.floor(minutes / 60)}h ${two(minutes % 60)}m` : `${Math.floor(minutes / 1440)}d ${two(Math.floor(minutes / 60) % 24)}h`;
}
function date(seconds, short) {
  const d = new Date(seconds * 1000);
  const time = `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
  return short ? time : `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${time}`;
}
function format(value, unit = "short", decimals) {
  const [kind, word] = unit.split(/:(.*)/);
  if (unit === "percentunit") return fixed(100 * value, decimals ?? (Math.abs(value * 100 - Math.round(value * 100)) < 1e-6 ? 0 : 1)) + "%";
  if (DURATIONS.includes(unit)) return duration(value, decimals);
  if (unit === "dateTimeAsIso") return date(value / 1000);
  const [base, symbol] = kind === "suffix" ? [0, word] : kind === "count" ? [1000, word] : UNITS[unit] ?? [0, unit];
  let size = Math.abs(value), prefix = 0;
  for (; base && size >= base * 0.9995 && prefix < 5; prefix++) size /= base;
  const after = PREFIXES[base][prefix] + symbol;
  return (value < 0 ? "-" : "") + fixed(size, decimals) + (after && " ") + after;
}

// What a panel says of one field: its defaults, with the overrides of that name.
function field_of(panel, name) {
  const field = { ...panel.fieldConfig.defaults };
  for (const { matcher, properties } of panel.fieldConfig.overrides ?? [])
    if (matcher.options === name) for (const { id, value } of properties) field[id] = value;
  return field;
}
// Text and colour of a value by the mappings, thresholds and unit of its field.
function shown(value, field) {
  let text = value == null ? field.noValue || "" : typeof value === "number" ? format(value, field.unit, field.decimals) : String(value);
  let color = field.color?.mode === "fixed" ? field.color.fixedColor : null;
  if (typeof value === "number" && field.color?.mode !== "fixed")
    for (const step of field.thresholds?.steps ?? []) if (step.value == null || value >= step.value) color = step.color;
  const word = field.mappings?.[0]?.options[value];
  if (word) ({ text, color } = word);
  return { text, color: colour(color === "text" ? null : color) };
}
const known = (values) => values.filter((value) => value != null);
const last = (one) => (one.value !== undefined ? one.value : known(one.values).at(-1) ?? null);

// Axes
function steps_between(low, high, count, unit) {
  const rough = (high - low) / count, base = UNITS[unit]?.[0] === 1024 ? 1024 : 10;
  const factors = base === 1024 ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] : [1, 2, 2.5, 5, 10];
  let power = base ** Math.floor(Math.log(rough) / Math.log(base)), nice = factors.find((f) => f * power >= rough * 0.999) * power;
  if (DURATIONS.includes(unit) && rough > 10) nice = CLOCK.find((s) => s >= rough * 0.999);
  const out = [];
  for (let value = Math.ceil(low / nice - 1e-9) * nice; value <= high + nice * 1e-6; value += nice) out.push(Math.abs(value) < nice * 1e-6 ? 0 : value);
  return out;
}
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000, 31536000, 1e9];
function time_steps(time, count) {
  const step = CLOCK.find((s) => s >= (time.to - time.from) / count), zone = new Date(time.to * 1000).getTimezoneOffset() * 60, out = [];
  for (let t = Math.ceil((time.from - zone) / step) * step + zone; t <= time.to; t += step) out.push(t);
  return [out, (t) => (step >= 86400 ? date(t).slice(5, 10) : step >= 60 ? date(t, true).slice(0, 5) : date(t, true))];
}

// A plot in time: frame, marks, cross-hair. `view` paints into it and knows the rows of one moment.
function plot(box, time, view) {
  const area = el("div", { class: "area" });
  box.replaceChildren(area, ...(view.legend ? [view.legend] : []));
  const width = Math.max(120, area.clientWidth), height = Math.max(44, area.clientHeight);
  const frame = { left: Math.min(view.left, width / 2), right: width - 10, top: 6, bottom: height - 18 };
  const x = (t) => frame.left + (t - time.from) / (time.to - time.from) * (frame.right - frame.left);
  const svg = el("svg", { width, height, role: "img", "aria-label": view.label });
  const [moments, clock] = time_steps(time, Math.max(2, (frame.right - frame.left) / 95));
  for (const t of moments) {
    svg.append(el("line", { class: "grid", x1: x(t), x2: x(t), y1: frame.top, y2: frame.bottom }));
    svg.append(el("text", { x: x(t), y: height - 4, "text-anchor": x(t) > width - 24 ? "end" : "middle" }, clock(t)));
  }
  area.append(svg);
  view.paint(svg, { ...frame, x, area });
  const overlay = view.over ? el("svg", { width, height, class: "over" }) : svg, marks = el("g"), vertical = { y1: frame.top, y2: frame.bottom };
  const hair = el("line", { class: "hair", ...vertical, visibility: "hidden" });
  const chosen = el("rect", { class: "chosen", y: frame.top, height: frame.bottom - frame.top, width: 0 });
  overlay.append(marks, chosen, hair);
  if (view.over) area.append(overlay);
  const self = {
    area, time, rows: view.rows,
    moment: (clientX) => time.from + (clientX - area.getBoundingClientRect().left - frame.left) / (frame.right - frame.left) * (time.to - time.from),
    place: (t) => area.getBoundingClientRect().left + x(t),
    mark(all) {
      marks.replaceChildren(...all.filter((m) => m.end >= time.from && m.at <= time.to).map((m) => el("g", { class: "mark", "--c": colour(m.color) },
        m.end > m.at ? el("rect", { x: x(Math.max(m.at, time.from)), y: frame.top, width: Math.max(1, x(Math.min(m.end, time.to)) - x(Math.max(m.at, time.from))), height: frame.bottom - frame.top }) : null,
        m.at < time.from ? null : el("line", { x1: x(m.at), x2: x(m.at), ...vertical }),
        m.at < time.from ? null : el("path", { d: `M${x(m.at) - 4} ${frame.bottom + 5}h8l-4 -6z` }, el("title", {}, m.text)))));
    },
    cross(t) {
      hair.setAttribute("visibility", t >= time.from && t <= time.to ? "visible" : "hidden");
      for (const end of ["x1", "x2"]) hair.setAttribute(end, x(t) || 0);
    },
    choose(a, b) {
      chosen.setAttribute("x", Math.max(frame.left, x(Math.min(a, b)))); chosen.setAttribute("width", Math.max(0, Math.abs(x(b) - x(a)) || 0));
    },
  };
  PLOTS.set(box, self);
}
const at = (time, t) => Math.round((t - time.from) / time.step);
const summary = (all, field) => `${all.length} series; ` + all.slice(0, 6).map((s) => `${s.name} ${shown(last(s), field).text}`).join(", ");

function legend_of(panel, all, repaint) {
  return el("div", { class: "legend" }, all.map((one) => el("button", { type: "button", "aria-pressed": String(panel.only === one.name), title: "Show only this series",
    onclick: () => { panel.only = panel.only === one.name ? null : one.name; repaint(); } }, el("i", { "--c": one.color }), one.name)));
}
// Names of the rows of a plot beside them, as many as there is room for
const row_names = (all) => Math.min(16 + 6.5 * Math.max(...all.map((one) => one.name.length)), 170);
function name_rows(svg, all, left, top, height) {
  all.forEach(({ name }, n) => {
    if (n % Math.ceil(11 / height)) return;
    svg.append(el("text", { x: left - 6, y: top + (n + 0.5) * height + 4, "text-anchor": "end" }, el("title", {}, name), name.length > 24 ? name.slice(0, 23) + "…" : name));
  });
}

const DRAW = {
  timeseries(panel, all, box, time, repaint) {
    const field = panel.fieldConfig.defaults, custom = field.custom ?? {}, stacked = custom.stacking?.mode === "normal";
    all = all.map((one, index) => {
      const own = field_of(panel, one.name);
      return { ...one, color: own.color?.mode === "fixed" ? colour(own.color.fixedColor) : series_colour(index) };
    });
    const seen = all.filter((one) => !panel.only || one.name === panel.only), sum = new Array(time.count).fill(0);
    for (const one of seen) {
      one.low = stacked ? sum.slice() : null;
      one.high = stacked ? one.values.map((value, i) => (value == null ? null : (sum[i] += value))) : one.values;
    }
    const values = seen.flatMap((one) => known(one.high)), limits = (custom.thresholdsStyle?.mode ?? "off") === "off" ? [] : field.thresholds.steps.filter((s) => s.value != null);
    let low = field.min ?? values.reduce((a, b) => Math.min(a, b), stacked ? 0 : Infinity);
    let high = field.max ?? values.reduce((a, b) => Math.max(a, b), custom.axisSoftMax ?? -Infinity);
    if (!(high > low)) { high = Math.max(low, high) + (Math.abs(low) || 1); if (field.min == null && low > 0) low = 0; }
    const legend = legend_of(panel, all, repaint), count = Math.max(2, Math.round((box.clientHeight - 60) / 38));
    const ticks = steps_between(low, high, count, field.unit);
    if (field.max == null && ticks.length > 1 && ticks.at(-1) < high) { ticks.push(2 * ticks.at(-1) - ticks.at(-2)); high = ticks.at(-1); }
    const write = (v) => format(v, field.unit, field.unit === "percentunit" ? field.decimals : (v === 0 ? 0 : undefined));
    const stepped = custom.lineInterpolation === "stepAfter", left = 16 + 6.3 * Math.max(...ticks.map((v) => write(v).length), 2);
    plot(box, time, {
      left, legend, label: summary(all, field),
      paint(svg, { left, right, top, bottom, x }) {
        const y = (v) => bottom - (Math.min(Math.max(v, low), high) - low) / (high - low) * (bottom - top);
        for (const v of ticks) svg.append(el("line", { class: "grid", x1: left, x2: right, y1: y(v), y2: y(v) }), el("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, write(v)));
        for (const one of seen) {
          const opacity = custom.fillOpacity / 100;
          let line = "", fill = "", start = -1;
          const close = (end) => {
            if (start >= 0 && opacity) { // back along the floor
              for (let i = end; i >= start; i--) fill += `L${x(time.from + i * time.step).toFixed(1)} ${y(one.low?.[i] ?? Math.max(low, 0)).toFixed(1)}`;
              fill += "Z";
            }
            start = -1;
          };
          one.high.forEach((value, i) => {
            if (value == null) { close(i - 1); return; }
            const px = x(time.from + i * time.step).toFixed(1), py = y(value).toFixed(1), alone = one.high[i - 1] == null && one.high[i + 1] == null;
            line += start < 0 ? `M${px} ${py}${alone ? "h.1" : ""}` : stepped ? `H${px}V${py}` : `L${px} ${py}`;
            fill += start < 0 ? `M${px} ${py}` : stepped ? `H${px}V${py}` : `L${px} ${py}`;
            if (start < 0) start = i;
          });
          close(time.count - 1);
          if (opacity) svg.append(el("path", { class: "fill", d: fill, "--c": one.color, "--o": opacity }));
          svg.append(el("path", { class: "line", d: line, "--c": one.color, "stroke-width": custom.lineWidth }));
        }
        for (const step of limits) if (step.value >= low && step.value <= high) svg.append(el("line", { class: "limit", x1: left, x2: right, y1: y(step.value), y2: y(step.value), "--c": colour(step.color) }));
      },
      rows: (t) => seen.map((one) => ({ name: one.name, color: one.color, value: one.values[at(time, t)] })).filter((row) => row.value != null)
        .sort((a, b) => b.value - a.value).map((row) => ({ ...row, text: format(row.value, field.unit, field.decimals) })),
    });
  },

  // Rows of coloured stretches in time, with their words where they fit
  "state-timeline"(panel, all, box, time) {
    const field = panel.fieldConfig.defaults;
    plot(box, time, {
      left: row_names(all), label: summary(all, field),
      paint(svg, { left, right, top, bottom, x }) {
        const row = (bottom - top) / all.length, high = Math.max(1, row * panel.options.rowHeight);
        name_rows(svg, all, left, top, row);
        all.forEach((one, n) => {
          const y = top + n * row + (row - high) / 2;
          const states = one.values.map((value) => (value == null ? {} : shown(value, field)));
          for (let i = 0, j; i < time.count; i = j) {
            const { text, color } = states[i];
            for (j = i + 1; j < time.count && states[j].text === text && states[j].color === color;) j++;
            if (text == null) continue;
            const x1 = x(time.from + i * time.step), wide = Math.min(right, x(time.from + j * time.step)) - x1;
            svg.append(el("rect", { class: "state", x: x1, y, width: Math.max(1, wide - 0.5), height: high, "--c": color ?? "var(--gray)" }));
            if (wide > 7 * text.length + 8 && high > 12) svg.append(el("text", { class: "word", x: x1 + 5, y: y + high / 2 + 4 }, text));
          }
        });
      },
      rows: (t) => all.map((one) => { const { text, color } = shown(one.values[at(time, t)] ?? null, field); return { name: one.name, color: color ?? "var(--gray)", text }; }).filter((row) => row.text),
    });
  },

  // One row of cells for each series; the pointer reads the cell below it
  heatmap(panel, all, box, time) {
    all.sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
    let row_at;
    const { color } = panel.options, { unit } = panel.fieldConfig.defaults, values = all.flatMap((one) => known(one.values));
    const low = color.min ?? values.reduce((a, b) => Math.min(a, b), Infinity), high = color.max ?? values.reduce((a, b) => Math.max(a, b), -Infinity);
    const rgb = (value) => {
      const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0.5, place = share * (TURBO.length - 1);
      const k = Math.min(TURBO.length - 2, Math.floor(place)), part = (stop, bits) => (stop >> bits) & 255;
      return [16, 8, 0].map((bits) => part(TURBO[k], bits) + (part(TURBO[k + 1], bits) - part(TURBO[k], bits)) * (place - k));
    };
    const scale = el("canvas", { width: 64, height: 1 }), ink = (canvas, cells) => canvas.getContext("2d").putImageData(new ImageData(Uint8ClampedArray.from(cells.flat()), canvas.width, canvas.height), 0, 0);
    ink(scale, Array.from({ length: 64 }, (_, i) => [...rgb(low + (high - low) * i / 63), 255]));
    plot(box, time, {
      left: row_names(all), over: true, label: `Heat map, ${summary(all, { unit })}`,
      legend: el("div", { class: "legend scale" }, format(low, unit), scale, format(high, unit)),
      paint(svg, { left, right, top, bottom, x, area }) {
        const row = (bottom - top) / all.length, canvas = el("canvas", { width: time.count, height: all.length, class: "cells", "--x": left + "px", "--y": top + "px", "--w": right - left + "px", "--h": bottom - top + "px" });
        row_at = (y) => all[Math.floor((y - top) / row)];
        ink(canvas, all.flatMap((one) => one.values.map((value) => (value == null ? [0, 0, 0, 0] : [...rgb(value), 255]))));
        area.append(canvas);
        name_rows(svg, all, left, top, row);
      },
      rows: (t, y) => (y == null ? all : [row_at(y) ?? []].flat()).map((one) => ({ name: one.name, value: one.values[at(time, t)] })).filter((row) => row.value != null || y != null)
        .sort((a, b) => b.value - a.value).map((row) => ({ ...row, ...(row.value == null ? { color: "var(--gray)", text: "no data" } : { color: `rgb(${rgb(row.value)})`, text: format(row.value, unit) }) })),
    });
  },

  stat(panel, all, box) {
    if (!all.length) all = [{ name: "", value: null }];
    box.replaceChildren(el("div", { class: "stats" }, all.map((one) => {
      const value = last(one), { text, color } = shown(value, panel.fieldConfig.defaults);
      return el("div", { class: `tile ${value == null ? "unknown" : ""}`, "--n": Math.max(4, text.length), "--c": color },
        el("div", { class: "big" }, text), one.name && panel.options.textMode === "value_and_name" ? el("div", { class: "name" }, one.name) : null);
    })));
  },

  gauge(panel, all, box) {
    const field = panel.fieldConfig.defaults, value = all.length ? last(all[0]) : null, { text, color } = shown(value, field);
    const share = Math.min(1, Math.max(0, (value - field.min) / (field.max - field.min))), arc = (to) => {
      const angle = Math.PI * (1 + to); return `M8 60A52 52 0 0 1 ${60 + 52 * Math.cos(angle)} ${60 + 52 * Math.sin(angle)}`; };
    box.replaceChildren(el("div", { class: `tile dialled ${value == null ? "unknown" : ""}`, "--n": Math.max(5, text.length) },
      el("svg", { viewBox: "0 0 120 66", role: "img", "aria-label": text }, el("path", { class: "rail", d: arc(1) }), share > 0 ? el("path", { class: "dial", d: arc(share), "--c": color ?? "var(--blue)" }) : null),
      el("div", { class: "big" }, text)));
  },

  bargauge(panel, all, box) {
    const field = panel.fieldConfig.defaults, most = field.max ?? Math.max(...known(all.map(last)), 1e-9);
    box.replaceChildren(el("div", { class: "bars" }, all.map((one) => {
      const value = last(one), { text, color } = shown(value, field), share = Math.min(1, Math.max(0, (value - field.min) / (most - field.min)));
      return el("div", { class: "bar" }, el("span", { title: one.name }, one.name), el("i", {}, el("b", { "width%": `${100 * share}%`, "--c": color ?? "var(--blue)" })), el("span", { class: "number" }, text));
    })));
  },

  table(panel, rows, box, _time, repaint) {
    const by = panel.sorted ?? panel.options.sortBy?.[0], field = rows.names.map((name) => field_of(panel, name));
    if (by) rows.sort((a, b) => { const [x, y] = [a[by.displayName] ?? null, b[by.displayName] ?? null]; // unknown comes last
      return x === y ? 0 : x === null ? 1 : y === null ? -1 : (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true })) * (by.desc ? -1 : 1); });
    const numbers = rows.names.map((name, i) => !field[i].mappings?.length && rows.some((row) => typeof row[name] === "number"));
    const head = rows.names.map((name, i) => { const sorted = by?.displayName === name;
      return el("th", { scope: "col", class: numbers[i] ? "number" : null, "aria-sort": sorted ? (by.desc ? "descending" : "ascending") : null },
        el("button", { type: "button", onclick: () => { panel.sorted = { displayName: name, desc: sorted ? !by.desc : true }; repaint(); } }, name)); });
    const cell = (row, i) => {
      const value = row[rows.names[i]] ?? null, { text, color } = shown(value, field[i]);
      return el("td", { class: numbers[i] ? "number" : null, "--c": field[i].mappings ? color : null }, link(field[i].links, { row, value }, text));
    };
    box.replaceChildren(el("table", { "aria-label": panel.title }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows.map((row) => el("tr", {}, rows.names.map((_, i) => cell(row, i)))))));
  },
};
const TURBO = [0x30123b, 0x4662d7, 0x36aaf9, 0x1ae4b6, 0x72fe5e, 0xc8ef34, 0xfaba39, 0xf66b19, 0xcb2a04, 0x7a0403];
