"use strict";
const POLL_MS = 1000, MOST = 900; // points that are kept: those since the page was opened, 15 minutes at most
const SHADES = ["#2f6fd6", "#d9822b", "#2b9a66", "#a04fc4", "#d1495b", "#5c7a99", "#b08d13", "#1f9fb5"];
const main = document.querySelector("main"), state = document.querySelector("#state");
const views = new Map(); // path of a run -> its view

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const number = (value) => Math.abs(value) >= 1e5
  ? Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value)
  : value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0 });
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");
const percent = (share) => `${Math.round(100 * share)} %`;

function element(name, options = {}, ...children) {
  const made = Object.assign(document.createElement(name), options);
  made.append(...children);
  return made;
}

function duration(seconds) {
  if (seconds === undefined) return "";
  const [size, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${Number((seconds / size).toPrecision(3))} ${unit}`;
}

function table(headings, rows) {
  const head = headings.map(([title, kind]) => element("th", { textContent: title, className: kind ?? "" }));
  return element("div", { className: "scroll" },
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
}

function row(cells, className = "") {
  const made = cells.map((cell) => {
    if (cell instanceof Node) return element("td", {}, cell);
    const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
    return element("td", { textContent: text, className: kind });
  });
  return element("tr", { className }, ...made);
}

// Title -> unit and values by the names of lines, of which the page keeps those that it has seen.
function plotsOf(run) {
  const of = (holds) => run.tiles.filter(([name]) => holds(name));
  const found = {
    "steps per second": ["", of((name) => name === "steps/s")],
    "mean return": ["", of((name) => name.includes("return"))],
    "busy": ["%", Object.entries(run.nodes ?? {}).map(([name, node]) => [name, 100 * node.busy])],
    "policy versions": ["", of((name) => name.includes("version") || name.includes("lag"))],
  };
  const drawn = Object.entries(found).filter(([, [, lines]]) => lines.length);
  return new Map(drawn.map(([title, [unit, lines]]) => [title, { unit, values: Object.fromEntries(lines) }]));
}

function bar(node) {
  const made = element("span", { className: "bar",
    title: `busy ${percent(node.busy)}, blocked ${percent(node.blocked)}, idle ${percent(node.idle)}` });
  for (const part of ["busy", "blocked"]) {
    const piece = element("i", { className: part });
    piece.style.width = `${100 * node[part]}%`;
    made.append(piece);
  }
  return made;
}

// A plot of some series over time, which has an axis with the unit and zero.
class Plot {
  constructor(title, unit, show) {
    this.show = show;
    this.unit = unit;
    this.box = element("div", {}, element("h3", { textContent: title }));
    this.names = [];
  }

  draw(times, series) {
    const names = [...series.keys()];
    const data = [times, ...names.map((name) => series.get(name))];
    if (this.plot && names.join() === this.names.join()) {
      this.plot.setData(data);
      return;
    }
    this.names = names;
    this.plot?.destroy();
    const axis = { stroke: () => css("--faint"), grid: { stroke: () => css("--grid") }, ticks: { stroke: () => css("--grid") },
      font: "11px system-ui, sans-serif" };
    const options = {
      width: this.box.clientWidth || 340, height: 170, cursor: { y: false }, padding: [8, 8, 0, 0],
      scales: { x: { range: (plot, low, high) => [Math.min(low, high - 60), high] }, y: { range: (plot, low, high) => [Math.min(0, low), Math.max(high * 1.05, low === high && !high ? 1 : high)] } },
      axes: [{ ...axis, space: 80, values: (plot, ticks) => ticks.map(clock) }, { ...axis, size: 64, values: (plot, ticks) => ticks.map((tick) => this.show(tick)) }],
      series: [{ value: "{HH}:{mm}:{ss}" }, ...names.map((name, at) => ({
        label: name, stroke: SHADES[at % SHADES.length], width: 1.6, spanGaps: false, points: { show: false },
        value: (plot, value) => (value == null ? "–" : this.show(value)),
      }))],
      legend: { show: names.length > 1, live: false },
    };
    this.plot = new uPlot(options, data, this.box);
  }

  resize() {
    this.plot?.setSize({ width: this.box.clientWidth, height: 170 });
  }
}

class RunView {
  constructor() {
    this.times = [];
    this.series = new Map(); // plot -> name -> values
    this.plots = new Map();
    this.top = element("div");
    this.grid = element("div", { className: "plots" });
    this.tables = element("div");
    this.box = element("section", {}, this.top, this.grid, this.tables);
    new ResizeObserver(() => this.plots.forEach((plot) => plot.resize())).observe(this.grid);
  }

  show(run) {
    this.box.className = run.is_bad ? "bad" : "";
    this.top.replaceChildren(...this.head(run));
    const isOpen = this.tables.querySelector("details")?.open ?? false;
    this.tables.replaceChildren(...this.foot(run, isOpen));
    this.remember(run);
  }

  * head(run) {
    yield element("h2", { textContent: run.title });
    const minutes = run.elapsed_s === undefined ? "" : ` · ${duration(run.elapsed_s)}`;
    const memory = run.memory_bytes ? ` · ${number(run.memory_bytes / 2 ** 20)} MiB` : "";
    yield element("p", { className: "where", textContent: `pid ${run.pid} · ${run.command ?? ""}${minutes}${memory}` });
    if (run.sentence) yield element("p", { className: "sentence", textContent: run.sentence });
    for (const text of run.texts) yield element("pre", { textContent: text });
    yield element("div", { className: "tiles" }, ...run.tiles.map(([name, value]) =>
      element("div", {}, element("b", { textContent: number(value) }), element("span", { textContent: name }))));
    if (run.picture) {
      const graph = element("div", { className: "scroll", innerHTML: run.picture });
      graph.firstChild.style.width = `${graph.firstChild.viewBox.baseVal.width}px`; // it scrolls where it is wider
      yield graph;
    }
  }

  * foot(run, isOpen) {
    const nodes = Object.entries(run.nodes ?? {});
    if (nodes.length) {
      const rows = nodes.map(([name, node]) => row([name, number(node.items_per_s), bar(node), percent(node.busy),
        duration(node.p50_s), duration(node.p99_s), duration(node.longest_s), [node.slowest_piece ?? "", "words"]],
      name === run.bottleneck ? "slowest" : ""));
      yield table([["stage"], ["items/s"], ["time"], ["busy"], ["p50"], ["p99"], ["longest call"], ["slowest piece", "words"]], rows);
    }
    const edges = (run.edges ?? []).filter((edge) => "held" in edge);
    if (edges.length) {
      const rows = edges.map((edge) => row([`${edge.source} → ${edge.target}`, `${edge.held} of ${edge.capacity}`,
        number(edge.items_per_s), percent(edge.full), number(edge.dropped)]));
      yield table([["edge"], ["holds"], ["items/s"], ["full"], ["dropped"]], rows);
    }
    const calls = (run.parties ?? []).filter((party) => party.kind === "call").sort((a, b) => b.age_s - a.age_s);
    if (calls.length) {
      const rows = calls.slice(0, 12).map((party) => row([party.name, [party.doing, "words"], duration(party.age_s)]));
      yield table([["now in a call"], ["", "words"], ["for"]], rows);
    }
    const figures = Object.entries(run.figures ?? {});
    if (figures.length) {
      const rows = figures.map(([name, value]) => row([name, Number(value.toPrecision(6)).toLocaleString("en")]));
      yield element("details", { open: isOpen }, element("summary", { textContent: "all figures" }), table([["figure"], ["value"]], rows));
    }
  }

  remember(run) {
    const found = plotsOf(run);
    this.times.push(run.time ?? Date.now() / 1000);
    for (const title of new Set([...found.keys(), ...this.series.keys()])) {
      const all = this.series.get(title) ?? new Map();
      this.series.set(title, all);
      const values = found.get(title)?.values ?? {};
      for (const name of new Set([...Object.keys(values), ...all.keys()])) {
        if (!all.has(name)) all.set(name, Array(this.times.length - 1).fill(null));
        all.get(name).push(values[name] ?? null);
      }
    }
    if (this.times.length > MOST) {
      this.times.shift();
      this.series.forEach((all) => all.forEach((values) => values.shift()));
    }
    for (const [title, plot] of found) {
      if (!this.plots.has(title)) {
        const show = plot.unit === "%" ? (value) => `${Math.round(value)} %` : number;
        const made = new Plot(plot.unit && plot.unit !== "%" ? `${title}, ${plot.unit}` : title, plot.unit, show);
        this.plots.set(title, made);
        this.grid.append(made.box);
      }
      this.plots.get(title).draw(this.times, this.series.get(title));
    }
  }
}

async function poll() {
  try {
    const answer = await fetch("runs");
    const { runs, folder } = await answer.json();
    state.textContent = runs.length ? `${runs.length} run${runs.length > 1 ? "s" : ""} on this machine`
      : `no run of this user on this machine has a socket in ${folder}`;
    const paths = new Set(runs.map((run) => run.path));
    for (const [path, view] of views) {
      if (!paths.has(path)) {
        view.box.remove();
        views.delete(path);
      }
    }
    for (const run of runs) {
      if (!views.has(run.path)) {
        views.set(run.path, new RunView());
        main.append(views.get(run.path).box);
      }
      views.get(run.path).show(run);
    }
  } catch (error) {
    state.textContent = error instanceof TypeError ? "rollflow view has ended" : String(error);
  }
  setTimeout(poll, POLL_MS);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  views.forEach((view) => view.plots.forEach((plot) => plot.plot?.redraw())));
poll();
