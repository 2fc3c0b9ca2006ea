"use strict";
// Boards: Grafana's JSON to queries of the one Prometheus, and the controls around them.

const SECONDS = { s: 1, m: 60, h: 3600, d: 86400, w: 604800, M: 2592000, y: 31536000 };
const RANGES = { "5m": "5 minutes", "15m": "15 minutes", "1h": "hour", "3h": "3 hours", "6h": "6 hours", "12h": "12 hours", "24h": "24 hours", "2d": "2 days", "7d": "7 days", "30d": "30 days" };
const MOST_QUERIES = 6, MOST_POINTS = 400; // at once; of a series, more than pixels of most panels
const API = document.querySelector("meta[name=prometheus]").content.replace(/\/$/, "") || (/^https?:/.test(location.protocol) ? location.origin + location.pathname.replace(/\/user\/.*$/, "") : "");
const S = { values: new Map(), options: new Map(), open: new Map(), marked: new Map(), marks: [], shown: [], every: 15, scrape: 15, patience: 60 };
const board = () => BOARDS[S.board];
const variables = () => board().templating.list.filter((v) => v.type !== "datasource");

// Prometheus
let running = 0, heard = Date.now(); // when a query last began or ended
const silent = () => new Error(`Prometheus does not answer at ${API}`);
const waiting = [];
async function ask(path, parameters, get = false) {
  const { signal } = S.abort; // of its own round
  if (running >= MOST_QUERIES) await new Promise((go) => waiting.push(go)); // its slot is handed over
  else running++;
  heard = Date.now();
  try {
    if (!API) throw new Error("This copy of the page knows no Prometheus: write it with --prometheus URL");
    const body = new URLSearchParams(Object.entries(parameters));
    const answer = await fetch(`${API}/api/v1/${path}${get ? "?" + body : ""}`, get ? { signal } : { signal, method: "POST", body });
    const type = answer.headers.get("content-type") ?? "";
    if (!type.includes("json")) throw new Error(`Prometheus answered ${answer.status}: ${(await answer.text()).slice(0, 200)}`);
    const found = await answer.json();
    if (found.status !== "success") throw new Error(found.error);
    return found.data;
  } catch (error) {
    throw error instanceof TypeError ? silent() : error;
  } finally {
    heard = Date.now();
    const next = waiting.shift();
    if (next) next(); else running--;
  }
}
const number = (text) => (text === "NaN" || text.endsWith("Inf") ? null : Number(text));
function named(target, labels) {
  if (target.legendFormat && target.legendFormat !== "__auto") return target.legendFormat.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? "");
  return Object.entries(labels).filter(([name]) => name !== "__name__").map(([name, value]) => `${name}=${value}`).join(", ") || "value";
}
async function series_of(target, time) {
  const query = fill(target.expr, "query");
  if (target.instant) {
    return (await ask("query", { query, time: time.to })).result.map(({ metric, value }) => ({ ref: target.refId, name: named(target, metric), labels: metric, value: number(value[1]) }));
  }
  return (await ask("query_range", { query, start: time.from, end: time.to, step: time.step })).result.map(({ metric, values }) => {
    const all = new Array(time.count).fill(null);
    for (const [t, value] of values) all[at(time, t)] = number(value);
    return { ref: target.refId, name: named(target, metric), labels: metric, values: all };
  });
}
// Tables: the transformations merge and organize of Grafana
function rows_of(panel, all) {
  const ids = panel.targets.map((t) => t.refId), many = ids.length > 1, frames = ids.map((ref) => all.filter((one) => one.ref === ref)).filter((f) => f.length);
  const shared = frames.map((frame) => new Set(frame.flatMap((one) => Object.keys(one.labels)))).reduce((a, b) => new Set([...a].filter((name) => b.has(name))), new Set(frames[0]?.flatMap((one) => Object.keys(one.labels))));
  const rows = [], by_key = new Map(), names = new Set(["Time"]);
  for (const one of frames.flat()) {
    const row = { ...one.labels, Time: S.time.to * 1000, [many ? `Value #${one.ref}` : "Value"]: one.value }, key = JSON.stringify([...shared].map((name) => row[name]));
    Object.keys(row).forEach((name) => names.add(name));
    const fits = (by_key.get(key) ?? []).filter((other) => Object.keys(row).every((name) => !(name in other) || other[name] === row[name]));
    for (const other of fits) Object.assign(other, row);
    if (!fits.length) { rows.push(row); by_key.set(key, [...(by_key.get(key) ?? []), row]); }
  }
  const { excludeByName, indexByName, renameByName } = panel.transformations.find((t) => t.id === "organize").options, place = (name) => indexByName[name] ?? 99;
  const kept = [...names].filter((name) => !excludeByName[name]).sort((a, b) => place(a) - place(b) || (place(a) === 99 ? names.has(a) - names.has(b) : 0));
  const out = rows.map((row) => Object.fromEntries(kept.map((name) => [renameByName[name] || name, row[name] ?? null])));
  out.names = kept.map((name) => renameByName[name] || name);
  out.forEach((row, i) => Object.defineProperty(row, "raw", { value: rows[i] }));
  return out;
}

// Variables in queries, links and texts, as Grafana replaces them
const SPECIAL = /[\\^$.*+?()[\]{}|]/g;
const is_all = (v) => S.values.get(v.name)?.[0] === "$__all";
const in_url = (v) => (S.values.get(v.name) ?? []).map((value) => `var-${v.name}=${encodeURIComponent(value)}`).join("&");
function written(v, how) {
  const values = S.values.get(v.name) ?? [], quoted = (value) => value.replace(/\\/g, "\\\\").replace(/"/g, '\\"').replace(/\n/g, "\\n");
  if (how === "queryparam") return in_url(v);
  if (how === "text") return is_all(v) ? "All" : values.join(" + ");
  if (is_all(v)) return v.allValue;
  if (!v.multi) return quoted(values[0] ?? "");
  const all = values.map((value) => quoted(value.replace(SPECIAL, "\\$&")));
  return all.length > 1 ? `(${all.join("|")})` : all[0] ?? "";
}
function fill(text, how, scope = {}) {
  const { time } = S, { row, value } = scope;
  const special = {
    __range: `${Math.round(time.to - time.from)}s`, __interval: `${time.step}s`, __rate_interval: `${Math.max(4 * S.scrape, time.step + S.scrape)}s`,
    __url_time_range: `from=${S.from}&to=${S.to}`,
  };
  return text.replace(/\$(\w+)|\$\{([^}:]+)(?::(\w+))?\}/g, (whole, short, long, kind) => {
    const name = short ?? long, v = variables().find((each) => each.name === name), [, field] = /^__data\.fields\.(.+?)(?:\.numeric)?$/.exec(name) ?? [];
    if (v) return written(v, kind ?? how);
    const found = special[name] ?? (name === "__value.raw" ? value : row?.[field] ?? row?.raw[field] ?? (field && ""));
    return found == null ? whole : name in special || how !== "url" ? String(found) : encodeURIComponent(found);
  });
}
// A link of a board, panel or cell. Only boards and http(s) pages: no address from data runs as a script.
function address(url, scope) {
  const full = fill(url, "url", scope), [, uid, query] = /^\/d\/([\w-]+)\?(.*)$/.exec(full) ?? [];
  return uid ? `?board=${uid}&${query}` : /^https?:\/\//.test(full) ? full : null;
}
function link(links, scope, text) {
  const href = links?.length && text ? address(links[0].url, scope) : null;
  return href ? el("a", { href, title: links[0].title, ...(href.startsWith("?") ? {} : { target: "_blank", rel: "noopener noreferrer" }) }, text) : text;
}

// The address of the page holds all that was chosen
function moment(text, now) {
  const [whole, sign, count, unit] = /^now(?:([-+])(\d+)([smhdwMy]))?$/.exec(text) ?? [];
  return whole ? now + (sign === "+" ? 1 : -1) * (count ?? 0) * (SECONDS[unit] ?? 0) : /^\d+$/.test(text) ? text / 1000 : Date.parse(text) / 1000;
}
function set_time() {
  const now = Date.now() / 1000;
  let from = moment(S.from, now), to = moment(S.to, now);
  if (!(to > from)) { [S.from, S.to] = ["now-6h", "now"]; from = now - 21600; to = now; }
  const step = Math.max(S.scrape, Math.ceil((to - from) / MOST_POINTS)), start = Math.floor(from / step) * step, end = Math.max(start + step, Math.floor(to / step) * step);
  S.time = { from: start, to: S.to === "now" ? Math.max(end, Math.floor(to)) : end, step, count: Math.floor((Math.max(end, Math.floor(to)) - start) / step) + 1 };
}
function read_address() {
  const q = new URLSearchParams(location.search), wanted = q.get("board") ?? S.board;
  S.board = Object.hasOwn(BOARDS, wanted) ? wanted : Object.keys(BOARDS)[0];
  [S.from, S.to] = [q.get("from") ?? board().time.from, q.get("to") ?? board().time.to];
  for (const v of variables()) { const all = q.getAll(`var-${v.name}`).map((x) => (x === "All" && v.includeAll ? "$__all" : x)); if (all.length) S.values.set(v.name, all); else S.values.delete(v.name); }
}
const here = (uid = S.board) => `?board=${uid}&from=${S.from}&to=${S.to}&${variables().map(in_url).filter(Boolean).join("&")}`;
function change(part) { // of the choices, by the reader
  Object.assign(S, part);
  history.pushState(null, "", here());
  return render();
}
function zoom(from, to) { return change({ from: String(Math.round(from * 1000)), to: String(Math.round(to * 1000)) }); }

async function values_of(v) { // of a label
  const [, selector, label] = /^label_values\((?:(.*),)?\s*(\w+)\s*\)$/s.exec(v.query.query);
  const found = await ask(`label/${label}/values`, { ...(selector ? { "match[]": fill(selector, "query") } : {}), start: S.time.from, end: S.time.to }, true);
  found.sort((a, b) => a.localeCompare(b, undefined, { numeric: v.sort > 2 }));
  return v.sort % 2 ? found : found.reverse();
}
async function choose_values(dropped) {
  for (const v of variables()) { // in their order: later ones ask with the values of earlier ones
    const options = await values_of(v), has = (x) => x === "$__all" || options.includes(x);
    S.options.set(v.name, options);
    let values = S.values.get(v.name) ?? [];
    if (dropped && dropped !== v.name) values = values.filter(has);
    if (!values.length) values = v.includeAll ? ["$__all"] : options.slice(0, 1);
    S.values.set(v.name, v.multi ? values : values.slice(0, 1));
    for (const x of values) if (!has(x)) options.unshift(x);
  }
}

// Controls
function menu(label, name, ...content) {
  return el("details", { class: "menu" }, el("summary", { "aria-label": name }, label), el("div", { class: "pop" }, content));
}
function control(v) {
  const name = v.label || v.name, options = S.options.get(v.name), values = S.values.get(v.name), pick = (x) => { S.values.set(v.name, x); change({ dropped: v.name }); };
  const option = (x) => el("option", { value: x, selected: x === values[0] }, x);
  if (!v.multi) return el("label", { title: v.description }, name, el("select", { onchange: (e) => pick([e.target.value]) }, options.length ? options.map(option) : el("option", {}, "none")));
  const boxes = ["$__all", ...options].map((x) => el("label", {}, el("input", { type: "checkbox", checked: values.includes(x), onchange: (e) => {
    const rest = values.filter((other) => other !== x && other !== "$__all"), next = x === "$__all" ? [x] : e.target.checked ? [...rest, x] : rest;
    pick(next.length ? next : ["$__all"]); } }), x === "$__all" ? "All" : x));
  return el("div", { class: "choice", title: v.description }, name, menu(written(v, "text"), `${name}: ${written(v, "text")}`, boxes));
}
function controls() {
  const relative = S.to === "now" && /^now-/.test(S.from) ? S.from.slice(4) : null, { from, to } = S.time, local = (t) => date(t - new Date(t * 1000).getSeconds()).slice(0, 16).replace(" ", "T"), middle = (from + to) / 2, half = (to - from) / 2;
  const first = el("input", { type: "datetime-local", value: local(from) }), last = el("input", { type: "datetime-local", value: local(to) });
  const ranges = el("select", { "aria-label": "Time range", onchange: (e) => e.target.value && change({ from: `now-${e.target.value}`, to: "now" }) },
    relative in RANGES ? null : el("option", { value: "", selected: true }, relative ? `last ${relative}` : `${date(from).slice(5, 16)} to ${date(to).slice(date(from).slice(0, 10) === date(to).slice(0, 10) ? 11 : 5, 16)}`),
    Object.entries(RANGES).map(([value, text]) => el("option", { value, selected: value === relative }, `last ${text}`)));
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  const annotations = board().annotations.list.filter((a) => a.expr && !a.hide);
  $("bar").replaceChildren(
    el("nav", { "aria-label": "Boards" }, Object.entries(BOARDS).map(([uid, each]) => el("a", { href: uid === S.board ? here() : `?board=${uid}&from=${S.from}&to=${S.to}${S.values.has("cluster") ? "&" + in_url({ name: "cluster" }) : ""}`, "aria-current": uid === S.board ? "page" : null }, each.title))),
    el("div", { class: "time" }, button("‹", "Earlier", () => zoom(from - half, to - half)), ranges, button("›", "Later", () => zoom(from + half, to + half)), button("−", "Zoom out", () => zoom(middle - 2 * half, middle + 2 * half)),
      menu("from … to", "Absolute time range", el("label", {}, "From ", first), el("label", {}, "To ", last), button("Show", "Show this time range", () => zoom(Date.parse(first.value) / 1000, Date.parse(last.value) / 1000))),
      annotations.length ? menu("marks", "Marks in the plots", annotations.map((a) => el("label", {}, el("input", { type: "checkbox", checked: is_marked(a.name), onchange: (e) => { S.marked.set(a.name, e.target.checked); mark(); } }), el("i", { "--c": colour(a.iconColor) }), a.name))) : null,
      el("select", { "aria-label": "Refresh", onchange: (e) => { S.every = Number(e.target.value); } }, [[0, "no refresh"], [15, "every 15 s"], [60, "every minute"]].map(([value, text]) => el("option", { value, selected: value === S.every }, text))),
      button("↻", "Refresh now", () => render())),
    el("div", { class: "choices" }, variables().map(control), board().links.map((l) => el("a", { href: address(`${l.url}&\${__url_time_range}`), title: l.tooltip }, l.title, " →"))));
}

// Panels
async function draw(entry) {
  const { panel, box, node } = entry, { time, round } = S;
  try {
    node.classList.add("busy");
    if (!DRAW[panel.type]) throw new Error(`This page does not draw panels of the type ${panel.type}`);
    const all = (await Promise.all(panel.targets.map((t) => series_of(t, time)))).flat();
    if (round === S.round) {
      Object.assign(entry, { all, time });
      if (!box.querySelector("a:active, button:active")) paint(entry); // what is pressed must stay for the click
    }
  } catch (error) {
    if (error.name === "AbortError" || round !== S.round) return;
    S.errors++;
    entry.all = null;
    PLOTS.delete(box);
    box.replaceChildren(el("p", { class: "error" }, error.message));
  }
  node.classList.remove("busy");
}
function paint(entry) {
  const { panel, box, time, all } = entry, old = document.activeElement, like = (node) => node.textContent + node.href, key = old !== box && box.contains(old) && like(old);
  const twins = () => (key ? [...box.querySelectorAll("a, button")].filter((node) => like(node) === key) : []), place = twins().indexOf(old), rows = panel.type === "table" ? rows_of(panel, all) : all.map((one) => ({ ...one }));
  const has = all.some((one) => one.value !== undefined || known(one.values).length);
  if (has || ["stat", "gauge"].includes(panel.type)) {
    DRAW[panel.type](panel, rows, box, time, () => paint(entry));
    PLOTS.get(box)?.mark(visible_marks());
  } else {
    PLOTS.delete(box);
    box.replaceChildren(el("p", { class: "none" }, panel.fieldConfig.defaults.noValue || "no data"));
  }
  if (place >= 0) (twins()[place] ?? twins().at(-1) ?? box).focus({ preventScroll: true }); // the reader was at a link or button of it
}
function panel_node(panel, top) {
  const { x, y, w, h } = panel.gridPos, id = `panel-${panel.id}`, box = el("div", { class: "box", tabindex: 0, role: "group", "aria-labelledby": id });
  const head = el("header", {}, el("h3", { id, title: panel.title }, panel.title),
    panel.description ? menu("i", `About ${panel.title}`, el("p", {}, panel.description)) : null);
  const node = el("section", { class: `panel ${panel.type}`, role: "group", "aria-labelledby": id, "--x": x + 1, "--y": y - top + 1, "--w": w, "--h": h }, panel.title ? head : null, box);
  S.shown.push({ panel, box, node });
  return node;
}
function sections() { // each row with its panels; panels of a closed row are in its own list
  const out = [{ row: null, panels: [] }];
  for (const panel of board().panels) if (panel.type === "row") out.push({ row: panel, panels: [...(panel.panels ?? [])] }); else out.at(-1).panels.push(panel);
  return out.filter(({ row, panels }) => row || panels.length);
}
function layout() {
  S.shown = [];
  PLOTS.clear();
  $("board").replaceChildren(el("h1", {}, board().title), ...sections().map(({ row, panels }) => {
    const key = `${S.board}/${row?.title}`, open = !row || (S.open.get(key) ?? !row.collapsed);
    const top = Math.min(...panels.map((p) => p.gridPos.y)), grid = el("div", { class: "grid", hidden: !open });
    const show = () => grid.replaceChildren(...panels.map((panel) => panel_node(panel, top)));
    const toggle = (e) => {
      const now = !(S.open.get(key) ?? !row.collapsed), before = S.shown.length;
      S.open.set(key, now);
      e.currentTarget.setAttribute("aria-expanded", String(now));
      grid.hidden = !now;
      if (now) { show(); done(S.shown.slice(before).map(draw)); } else { S.shown = S.shown.filter(({ box }) => !grid.contains(box)); grid.replaceChildren(); }
    };
    if (open) show();
    return el("section", { class: "row" }, row ? el("h2", {}, el("button", { type: "button", "aria-expanded": String(open), onclick: toggle }, row.title, el("small", {}, `${panels.length} panel${panels.length === 1 ? "" : "s"}`))) : null, grid);
  }));
}

// Marks: moments and stretches of the annotations' queries, in all plots
const is_marked = (name) => S.marked.get(name) ?? board().annotations.list.find((a) => a.name === name).enable;
const visible_marks = () => S.marks.filter((m) => is_marked(m.of));
function mark() { for (const self of PLOTS.values()) self.mark(visible_marks()); }
async function find_marks() {
  const { time, round } = S, found = await Promise.all(board().annotations.list.filter((a) => a.expr).map(async (a) => {
    const write = (text, labels) => (text ?? "").replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? ""), out = [];
    for (const one of await series_of({ expr: a.expr }, time)) {
      const text = `${write(a.titleFormat, one.labels) || a.name} ${write(a.textFormat, one.labels)}`, add = (from, end) => out.push({ at: from, end, text, color: a.iconColor, of: a.name });
      if (a.useValueForTime) new Set(known(one.values)).forEach((ms) => add(ms / 1000, ms / 1000));
      else one.values.forEach((v, i, all) => { if (v > 0 && !(all[i - 1] > 0)) { let j = i; while (all[j + 1] > 0) j++; add(time.from + i * time.step, time.from + j * time.step); } });
    }
    return out;
  }));
  if (round === S.round) { S.marks = found.flat(); mark(); }
}

// The one cross-hair
let hair = { t: null, box: null };
function cross(t, box, place) {
  hair = { t, box };
  for (const self of PLOTS.values()) self.cross(t);
  const self = PLOTS.get(box), tip = $("tip");
  tip.setAttribute("aria-live", place ? "off" : "polite"); // read aloud to those who move it by keys
  tip.hidden = t == null || !self;
  if (tip.hidden) return;
  const rows = self.rows(t, place && place[1] - self.area.getBoundingClientRect().top), near = visible_marks().filter((m) => Math.abs(self.place(m.at) - self.place(t)) < 6);
  tip.replaceChildren(el("time", {}, date(t)), ...near.map((m) => el("div", { class: "near" }, el("i", { "--c": colour(m.color) }), m.text)), el("table", {}, el("tbody", {}, rows.slice(0, MOST_ROWS).map((r) => el("tr", {}, el("td", {}, el("i", { "--c": r.color }), r.name), el("td", { class: "number" }, r.text))))),
    rows.length > MOST_ROWS ? el("small", {}, `and ${rows.length - MOST_ROWS} more`) : "");
  const [x, y] = place ?? [self.place(t), self.area.getBoundingClientRect().top + 12], { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${x + 16 + width > innerWidth ? Math.max(4, x - width - 16) : x + 16}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - height - 8))}px`;
}
function watch_pointer() {
  let start = null;
  const box_of = (e) => { const box = e.target.closest?.(".box"); return PLOTS.has(box) && PLOTS.get(box).area.contains(e.target) ? box : null; };
  document.addEventListener("pointermove", (e) => {
    const box = start?.box ?? box_of(e), self = PLOTS.get(box);
    if (!self) return hair.t == null || document.activeElement === hair.box ? null : cross(null, null);
    const t = Math.min(self.time.to, Math.max(self.time.from, self.moment(e.clientX)));
    if (start) self.choose(start.t, t);
    cross(t, box, [e.clientX, e.clientY]);
  });
  document.addEventListener("pointerdown", (e) => { const box = e.button === 0 ? box_of(e) : null; if (box) { start = { box, t: PLOTS.get(box).moment(e.clientX), x: e.clientX }; if (e.pointerType === "mouse") e.preventDefault(); } });
  document.addEventListener("pointerup", (e) => {
    const from = start, self = PLOTS.get(start?.box);
    start = null;
    if (!self) return;
    self.choose(0, 0);
    const t = Math.max(self.time.from, Math.min(self.time.to, self.moment(e.clientX)));
    if (Math.abs(e.clientX - from.x) > 6) { cross(null, null); zoom(Math.min(from.t, t), Math.max(from.t, t)); } else from.box.focus({ preventScroll: true });
  });
  document.addEventListener("pointercancel", () => { PLOTS.get(start?.box)?.choose(0, 0); start = null; });
  document.addEventListener("click", (e) => document.querySelectorAll("details[open]").forEach((d) => { if (!d.contains(e.target)) d.open = false; }));
  document.addEventListener("focusin", (e) => { if (hair.box && hair.box !== e.target) cross(null, null); });
  document.addEventListener("keydown", (e) => {
    const open = document.querySelector("details[open]"), box = document.activeElement, self = PLOTS.get(box), { from, to, step } = self?.time ?? {};
    if (e.key === "Escape") { if (open) { open.open = false; open.firstChild.focus(); } cross(null, null); return; }
    if (!self || e.ctrlKey || e.metaKey || e.altKey) return;
    const t = hair.box === box && hair.t != null ? hair.t : to, by = step * (e.shiftKey ? 10 : 1), go = { ArrowLeft: t - by, ArrowRight: t + by, Home: from, End: to }[e.key];
    if (go != null) { cross(Math.min(to, Math.max(from, go)), box); e.preventDefault(); }
    if (e.key === "+") zoom(t - (to - from) / 4, t + (to - from) / 4);
    if (e.key === "-") zoom(from - (to - from) / 2, to + (to - from) / 2);
  });
}

// Rounds: all is asked again; an older round's answers are dropped
function say(text) { if ($("said").textContent !== text) $("said").textContent = text; } // a screen reader reads each change aloud
async function done(work) {
  const began = performance.now(), { round } = S;
  S.errors = 0;
  await Promise.all(work);
  if (round !== S.round) return;
  const errors = document.querySelectorAll(".box > .error").length;
  $("status").textContent = `${S.shown.length} panels${errors ? `, ${errors} failed` : ""}${S.unmarked ? ", marks failed" : ""} in ${((performance.now() - began) / 1000).toFixed(2)} s, ${date(Date.now() / 1000, true)}; ${S.time.step} s between points`;
  say(errors ? `Failed panels: ${errors}` : "");
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
  document.body.dataset.errors = String(errors);
}
async function render() {
  S.round = (S.round ?? 0) + 1;
  S.abort?.abort();
  S.abort = new AbortController();
  const round = S.round, chosen = document.activeElement?.closest("#bar") ? document.activeElement.getAttribute("aria-label") ?? document.activeElement.parentNode.firstChild.textContent : null;
  set_time();
  try {
    await choose_values(S.dropped);
  } catch (error) {
    if (error.name !== "AbortError") { $("board").replaceChildren(el("p", { class: "error" }, error.message)); say(error.message); }
    document.body.dataset.errors = "1";
    S.board_shown = null;
    return;
  }
  if (round !== S.round) return;
  S.dropped = null;
  const key = JSON.stringify([S.board, [...S.values]]);
  document.title = [board().title, ...variables().filter((v) => /name|job|node/.test(v.name) && !is_all(v)).map((v) => written(v, "text"))].join(" · ");
  const lists = JSON.stringify([...S.options]), shows = key + S.from + S.to; // a list may be open while it has the focus
  const held = document.querySelector("#bar details[open]") || (lists === S.lists && document.activeElement?.matches("#bar select"));
  if (shows !== S.shows || !held) { controls(); [S.lists, S.shows] = [lists, shows]; }
  if (chosen) [...document.querySelectorAll("#bar select, #bar button, #bar input, #bar summary")].find((node) => (node.getAttribute("aria-label") ?? node.parentNode.firstChild.textContent) === chosen)?.focus();
  if (S.board_shown !== S.board || key !== S.key) layout();
  [S.board_shown, S.key] = [S.board, key];
  const marked = find_marks().then(() => { S.unmarked = false; }, () => { if (round === S.round) { S.unmarked = true; S.marks = []; mark(); } });
  await done([marked, ...S.shown.map(draw)]);
}
async function start() {
  read_address();
  S.abort = new AbortController();
  watch_pointer();
  addEventListener("popstate", () => { read_address(); render(); });
  let width = innerWidth, timer;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(() => { if (width !== innerWidth) { width = innerWidth; S.shown.forEach((entry) => entry.all && paint(entry)); } }, 150); });
  setInterval(() => { // since the last answer: where all answers of a round take longer, a new one would drop them for good
    const waited = (Date.now() - heard) / 1000;
    if (running) { if (waited >= S.patience) S.abort.abort(silent()); } // a half-open connection never answers; this ends the round, so that the next can begin
    else if (S.every && S.to.startsWith("now") && !document.hidden && waited >= S.every) render();
  }, 1000);
  try { // the interval of the scrapes, for the windows of rates
    const { yaml } = await ask("status/config", {}, true), all = [...yaml.matchAll(/job_name: "?gpujob[^]*?scrape_interval: (\d+)([smh])/g)].map(([, n, unit]) => n * SECONDS[unit]);
    if (all.length) S.scrape = Math.max(...all);
  } catch { /* those who may not see the configuration get 15 s */ }
  await render();
}
start();
