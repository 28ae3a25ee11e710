// The only script of the pages: it draws charts, sorts and filters tables, and follows runs that grow.
"use strict";
(() => {
  const isFile = document.documentElement.hasAttribute("data-file");
  const narrow = () => innerWidth < 720;

  // The state of the controls is in the URL: in the query, or in the fragment of a written page.
  const stated = () =>
    new URLSearchParams(isFile ? (location.hash.startsWith("#~") ? location.hash.slice(2) : "") : location.search);
  function state(changes) {
    const now = stated();
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === "") now.delete(name);
      else now.set(name, value);
    }
    const text = now.toString();
    const rest = isFile ? (text ? "#~" + text : "#") : location.pathname + (text ? "?" + text : "") + location.hash;
    history.replaceState(null, "", rest);
  }

  // Colours and fonts of charts are those of the page.
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function themed(value) {
    if (typeof value === "string") {
      return value.startsWith("var(--") && value.endsWith(")") ? variable(value.slice(4, -1)) : value;
    }
    if (Array.isArray(value)) return value.map(themed);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item)]));
    }
    return value;
  }
  function axis(given) {
    const own = {
      automargin: true, gridcolor: variable("--line"), zerolinecolor: variable("--line"),
      linecolor: variable("--line"), tickcolor: variable("--line"), fixedrange: narrow(), exponentformat: "e", // superscripts need inline styles
    };
    const room = narrow() && given?.type === "date" ? { nticks: 3, tickangle: 0 } : {};
    return { ...own, ...given, ...room };
  }
  function layoutOf(given, height) {
    const layout = {
      height, autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 8, t: 22, b: 8 }, hovermode: "closest", dragmode: narrow() ? false : "zoom",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: variable("--muted") },
      hoverlabel: {
        bgcolor: variable("--raised"), bordercolor: variable("--line"), align: "left",
        font: { color: variable("--ink"), size: 12.5 },
      },
      colorway: ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"].map(variable),
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      ...given,
    };
    for (const name of ["xaxis", "yaxis"]) layout[name] = axis(layout[name]);
    return layout;
  }
  const smoothed = (values, by) => {
    let last = null;
    return values.map((value) => {
      if (value === null) return null;
      last = last === null ? value : by * last + (1 - by) * value;
      return last;
    });
  };
  // Plotly takes tags in texts as formatting.
  const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const unsafe = (text) => text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&quot;/g, '"').replace(/&#x27;/g, "'").replace(/&amp;/g, "&");

  // Runs side by side: their fields colour lines, and are the axes of two charts. Which runs are
  // hidden or pinned, and which axes are drawn, are lists in the URL.
  const listed = (name) => (stated().get(name) ?? "").split(",").filter(Boolean).map(decodeURIComponent);
  const space = () => JSON.parse(document.querySelector("script[data-space]")?.textContent || "null");
  function mixed(from, to, by) {
    const [one, two] = [from, to].map((name) => [1, 3, 5].map((at) => parseInt(variable(name).slice(at, at + 2), 16)));
    return "#" + one.map((part, index) => Math.round(part + by * (two[index] - part)).toString(16).padStart(2, "0")).join("");
  }
  // From blue through grey to orange, which all eyes tell apart.
  const ramp = (share) => (share < 0.5 ? mixed("--high", "--mid-ramp", 2 * share) : mixed("--mid-ramp", "--low", 2 * share - 1));
  // Eight colours, all but the grey also darker and lighter; beyond these 22 the same with dashes
  // and other symbols.
  const DASHES = ["solid", "dash", "dashdot", "longdash", "longdashdot"]; // dots are of superseded values
  const POINTS = ["circle", "square", "diamond", "triangle-up", "x"], SIGNS = ["●", "■", "◆", "▲", "✕"];
  function look(index) {
    const [tier, at] = [Math.floor(index / 22) % DASHES.length, index % 22];
    const colour = at < 8 ? variable(`--c${at + 1}`) : mixed(`--c${((at - 8) % 7) + 1}`, at < 15 ? "--ink" : "--paper", at < 15 ? 0.5 : 0.45);
    return { colour, dash: DASHES[tier], symbol: POINTS[tier], sign: SIGNS[tier] };
  }
  function scale(values) {
    const present = values.filter((value) => value !== null && value !== undefined);
    if (present.every((value) => typeof value === "number")) {
      const [low, high] = [Math.min(...present), Math.max(...present)];
      const isLog = low > 0 && high / low > 50;
      const at = isLog ? Math.log : (value) => value;
      const share = (value) => (high === low ? 0.5 : (at(value) - at(low)) / (at(high) - at(low)));
      return { isLog, share, ends: [[0, low], [1, high]], isNumber: true };
    }
    const texts = [...new Set(present.map(String))].sort();
    const share = (value) => (texts.length < 2 ? 0.5 : texts.indexOf(String(value)) / (texts.length - 1));
    return { share, texts, ends: texts.slice(0, 12).map((text) => [share(text), text]) };
  }
  function painter(known, by) {
    const order = known.runs.map((run) => run.name);
    if (!known.fields.some((field) => field.name === by)) return (name) => look(order.indexOf(name));
    const values = new Map(known.runs.map((run) => [run.name, run.values[by]]));
    const found = scale([...values.values()]);
    return (name) => {
      const value = values.get(name);
      if (value === null || value === undefined) return { ...look(0), colour: variable("--faint") };
      return found.isNumber ? { ...look(0), colour: ramp(found.share(value)) } : look(found.texts.indexOf(String(value)));
    };
  }
  function drawnRuns(known) {
    const [hidden, pinned] = [listed("hide"), listed("pin")];
    const paint = painter(known, stated().get("color"));
    return known.runs.filter((run) => !hidden.includes(run.name)).map((run) => ({
      ...run, ...paint(run.name), isPinned: pinned.includes(run.name), fades: pinned.length > 0 && !pinned.includes(run.name),
    }));
  }
  // At most three digits but for whole numbers: 0.000316116 is 3.16e-4.
  const short = (value) => {
    if (typeof value !== "number") return String(value).slice(0, 14);
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
    const three = Number(value.toPrecision(3));
    return Math.abs(three) >= 1e-3 && Math.abs(three) < 1e6 ? String(three) : three.toExponential();
  };
  function parallel(known, width) {
    const wanted = stated().has("axes") ? listed("axes") : known.axes;
    const axes = known.fields.filter((field) => wanted.includes(field.name));
    const scales = axes.map((field) => scale(known.runs.map((run) => run.values[field.name])));
    const data = drawnRuns(known).map((run) => {
      const values = axes.map((field) => run.values[field.name] ?? null);
      return {
        type: "scatter", mode: known.runs.length > 12 ? "lines" : "lines+markers", x: axes.map((_, index) => index), name: run.name, meta: run.name, showlegend: false,
        y: values.map((value, index) => (value === null ? null : scales[index].share(value))), opacity: run.fades ? 0.3 : 1,
        line: { color: run.colour, dash: run.dash, width: run.isPinned ? 3.5 : 1.8 }, marker: { size: 5, color: run.colour, symbol: run.symbol },
        text: values.map((value, index) => `${safe(axes[index].label)}: ${safe(value)}`), hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
      };
    });
    // Where axes are close their names take turns in two lines, and texts are cut to the room there is.
    const room = Math.max(width / Math.max(axes.length, 1), 24);
    const cut = (text, most) => (text.length > most / 7 ? text.slice(0, Math.max(Math.floor(most / 7) - 1, 2)) + "…" : text);
    const notes = axes.flatMap((field, index) => [
      { x: index, y: index % 2 && room < 130 ? 1.08 : 1.17, text: safe(cut(field.label, Math.min(room < 130 ? 1.3 * room : room, 126))), showarrow: false, xanchor: index === 0 ? "left" : index === axes.length - 1 ? "right" : "center", font: { color: variable("--ink") } },
      ...scales[index].ends.map(([share, text]) => ({ x: index, y: share, text: safe(typeof text === "number" ? short(text) : cut(text, room - 10)), showarrow: false, xanchor: "left", xshift: 4, bgcolor: variable("--paper"), opacity: 0.85 })),
    ]);
    return { data, layout: {
      annotations: notes, xaxis: { visible: false, range: [-0.15, axes.length - 0.15], fixedrange: true }, yaxis: { visible: false, range: [-0.06, 1.24], fixedrange: true },
      shapes: axes.map((_, index) => ({ type: "line", x0: index, x1: index, y0: 0, y1: 1, line: { color: variable("--faint"), width: 1 }, layer: "below" })),
    } };
  }
  function points(known) {
    const names = known.fields.map((field) => field.name);
    const chosen = (name, otherwise) => (names.includes(stated().get(name)) ? stated().get(name) : otherwise);
    const [x, y] = [chosen("sx", known.x), chosen("sy", known.y)];
    const side = (name) => {
      const found = scale(known.runs.map((run) => run.values[name]));
      return { title: { text: safe(known.fields[names.indexOf(name)].label), standoff: 4 }, type: found.isNumber ? (found.isLog ? "log" : "linear") : "category" };
    };
    const text = (value) => (typeof value === "string" ? safe(value) : value ?? null);
    const data = drawnRuns(known).map((run) => ({
      type: "scatter", mode: "markers", x: [text(run.values[x])], y: [text(run.values[y])], name: run.name, meta: run.name, showlegend: false, opacity: run.fades ? 0.3 : 1,
      marker: { size: run.isPinned ? 15 : 10, color: run.colour, symbol: run.symbol }, hovertemplate: "%{x}<br>%{y}<extra>%{fullData.name}</extra>",
    }));
    return { data, layout: { xaxis: side(x), yaxis: side(y), hovermode: "closest" } };
  }
  // One unit for all charts, since they share a zoom.
  function unitOfSpans() {
    const span = Math.max(...[...document.querySelectorAll("[data-span]")].map((plot) => Number(plot.dataset.span)));
    return [["days", 864e5], ["hours", 36e5], ["minutes", 6e4]].find(([, ms]) => span >= 2 * ms) ?? ["seconds", 1e3];
  }
  const SYMBOLS = { best: "star", gate: "diamond", release: "star-diamond", fork: "triangle-up" };

  function curves(payload) {
    const asked = stated();
    const hasTimes = payload.curves.every((curve) => curve.times.every((time) => time !== null));
    const byTime = asked.get("x") === "time" && hasTimes;
    const by = Math.min(Math.max(Number(asked.get("smooth")) || 0, 0), 0.99);
    const [unit, unitMs] = asked.get("x") === "since" && hasTimes && payload.span ? unitOfSpans() : [];
    const since = (one) => one.times.map((time) => Math.max(0, time - (one.began ?? payload.curves[0].began)) / unitMs);
    const along = (one) => (byTime ? one.times : unit ? since(one) : one.steps);
    const data = [];
    const [known, hidden] = [space(), listed("hide")];
    const paint = known && painter(known, asked.get("color"));
    const groups = [...new Set(payload.curves.filter((curve) => !curve.faint).map((curve) => curve.group))];
    const pinned = listed("pin").filter((run) => groups.includes(run));
    const told = new Set();
    // Over a few curves one box has all values, with the step or time as its heading.
    const isNamed = payload.curves.length > 1 && groups.length <= 12;
    const isUnified = isNamed && groups.length <= 6;
    const where = byTime ? "%{x}" : unit ? "%{x:.3~f} " + unit : "%{x:,d}";
    payload.curves.forEach((curve) => {
      if (hidden.includes(curve.group)) return;
      const index = groups.indexOf(curve.group);
      const isRun = known?.runs.some((run) => run.name === curve.group);
      const { colour, dash, symbol } = isRun ? paint(curve.group) : look(Math.max(index, 0));
      const color = curve.faint ? variable("--faint") : colour;
      const key = curve.faint ? curve.name : curve.group;
      const few = curve.values.length <= 40 && groups.length <= 12;
      const line = {
        type: "scatter", x: along(curve), y: curve.values, name: told.has(key) || curve.faint ? curve.name : curve.group,
        legendgroup: key, showlegend: isNamed && !told.has(key), meta: curve.group,
        mode: few ? "lines+markers" : "lines", line: { color, width: pinned.includes(curve.group) ? 3.5 : 1.8, dash: curve.faint ? "dot" : dash },
        marker: { size: 5, color, symbol }, opacity: pinned.length && !pinned.includes(curve.group) ? 0.3 : 1,
        text: curve.values.map(() => curve.name), hovertemplate: (isUnified ? "" : where + ": ") + "%{y:.6g}<extra>%{text}</extra>",
      };
      told.add(key);
      if (curve.band) {
        const edge = { type: "scatter", mode: "lines", x: line.x, meta: curve.group, legendgroup: key, line: { width: 0, color }, hoverinfo: "skip", showlegend: false };
        data.push({ ...edge, y: curve.band.map((ends) => ends[0]) }, { ...edge, y: curve.band.map((ends) => ends[1]), fill: "tonexty", fillcolor: color + "33" });
      }
      if (by > 0 && !curve.faint) {
        data.push({ ...line, opacity: 0.3, showlegend: false, hoverinfo: "skip", hovertemplate: undefined });
        data.push({ ...line, mode: "lines", y: smoothed(curve.values, by) });
      } else data.push(line);
    });
    for (const kind of new Set(payload.marks.map((mark) => mark.kind))) {
      const marks = payload.marks.filter((mark) => mark.kind === kind);
      data.push({
        type: "scatter", mode: "markers", x: marks.flatMap(along), y: marks.flatMap((mark) => mark.values), name: kind,
        marker: { symbol: SYMBOLS[kind], size: kind === "best" ? 13 : 10, color: variable("--good") },
        text: marks.map((mark) => mark.label), hovertemplate: "%{y:.6g}<extra>%{text}</extra>",
      });
    }
    const layout = {
      xaxis: byTime ? { type: "date" } : unit ? { title: { text: unit + " since the run began", standoff: 4 }, hoverformat: ".3~f" } : { title: { text: payload.counter, standoff: 4 }, rangemode: "normal", hoverformat: ",d", tickformat: ",~f" },
      yaxis: { type: asked.get("log") === "1" ? "log" : "linear", fixedrange: true },
      showlegend: isNamed || payload.marks.length > 0,
      hovermode: isUnified ? "x unified" : "closest",
    };
    const own = byTime ? "time" : unit ? "since" : "step";
    return { data, layout, own, outside: fit(data, layout, byTime, own === (asked.get("x") ?? "step")) };
  }
  // All curves of a page share one stretch of steps or time; each shows the values within it, but for
  // a few that are so far away that most others would share a tenth of the height: of at least 20
  // values, and never all of a run or of a mark. A chart without times is drawn by steps, and has no
  // part in a stretch of time. Returns the words.
  function fit(data, layout, byTime, isAsked) {
    const range = (isAsked ? listed("zoom") : []).map((end) => (byTime ? end : Number(end)));
    for (const button of document.querySelectorAll("[data-reset]")) button.hidden = listed("zoom").length !== 2;
    const isZoomed = range.length === 2 && range.every((end) => byTime || Number.isFinite(end));
    const [first, last] = !isZoomed ? [-Infinity, Infinity] : byTime ? range.map((end) => Date.parse(end.replace(" ", "T") + "Z")) : range;
    const within = (one) => one.y.filter((value, index) => value !== null && one.x[index] >= first && one.x[index] <= last);
    const values = data.flatMap(within).sort((one, two) => one - two), isLog = layout.yaxis.type === "log";
    const [low, high] = [values[Math.ceil(0.1 * (values.length - 1))], values[Math.floor(0.9 * (values.length - 1))]];
    const far = values.length >= 20 && high > low && !isLog && stated().get("full") !== "1" ? 10 * (high - low) : Infinity;
    const isFar = (value) => value < low - far || value > high + far;
    const isNeeded = data.map(within).some((own) => own.length && own.every(isFar));
    const isOutside = (value) => !isNeeded && isFar(value);
    const shown = values.filter((value) => !isOutside(value));
    if (isZoomed) layout.xaxis.range = range;
    if (!shown.length || (!isZoomed && shown.length === values.length)) return "";
    const [bottom, top] = [shown[0], shown[shown.length - 1]].map((value) => (isLog ? Math.log10(value) : value));
    if (Number.isFinite(bottom)) layout.yaxis.range = [bottom - 0.06 * (top - bottom || 1), top + 0.06 * (top - bottom || 1)];
    const drawn = data.filter((one) => one.meta && one.hoverinfo !== "skip").flatMap(within), outside = drawn.filter(isOutside);
    if (!outside.length) return "";
    const farthest = outside.reduce((one, two) => (Math.abs(two) > Math.abs(one) ? two : one));
    return `${outside.length} of ${drawn.length} values ${outside.length === 1 ? "is" : "are"} outside the y axis, up to ${short(farthest)}: “full range” shows all`;
  }

  // The library is large: only a page with charts loads it, and a written page has it in itself.
  let loading = null;
  function library() {
    loading ??= new Promise((resolve) => {
      if (window.Plotly || isFile) return resolve();
      const script = document.createElement("script");
      script.src = "/static/plotly.min.js";
      script.onload = script.onerror = resolve;
      document.head.append(script);
    });
    return loading;
  }
  async function draw(plot) {
    await library();
    const payload = JSON.parse(document.getElementById(plot.dataset.chart).textContent);
    const kinds = { curves, parallel: () => parallel(space(), plot.clientWidth), scatter: () => points(space()) };
    const figure = kinds[payload.kind]?.(payload) ?? { data: themed(payload.data), layout: themed(payload.layout) };
    plot.dataset.own = figure.own ?? "";
    const named = figure.layout.showlegend ? figure.data.filter((one) => one.showlegend !== false).length : 0;
    const told = plot.closest("figure").querySelector("[data-outside]");
    if (told) Object.assign(told, { hidden: !figure.outside, textContent: figure.outside });
    const isFull = document.fullscreenElement?.contains(plot);
    const height = isFull ? innerHeight - 110 : Number(plot.dataset.height) + 20 * Math.ceil(named / (narrow() ? 2 : 4));
    plot.style.height = height + "px";
    if (window.Plotly) {  // without it the tables beneath the charts remain
      plot.dataset.drawn = "1";
      await Plotly.react(plot, figure.data, layoutOf(figure.layout, height), { displayModeBar: false, responsive: true, scrollZoom: false });
      if (!plot.dataset.kind) listen(plot);
      plot.dataset.kind = payload.kind;
    }
  }

  // The run under the pointer lights up in every chart and in the table; its curves show the value
  // at the same step.
  function light(run) {
    for (const plot of document.querySelectorAll(".plot[data-drawn]")) {
      plot.classList.toggle("dim", run !== null);
      for (const trace of plot.querySelectorAll(".scatterlayer .trace")) {
        trace.classList.toggle("hot", run !== null && trace.__data__?.[0]?.trace?.meta === run);
      }
    }
    for (const row of document.querySelectorAll("tr[data-run]")) row.classList.toggle("hot", row.dataset.run === run);
  }
  let isShared = false;
  function share(plot, point) {
    isShared = true;
    for (const other of document.querySelectorAll(".plot[data-kind=curves]")) {
      const box = other.getBoundingClientRect();
      if (other === plot || box.bottom < 0 || box.top > innerHeight) continue;
      const number = other.data.findIndex((one) => one.meta === point.data.meta && one.hoverinfo !== "skip");
      const along = number < 0 ? [] : other.data[number].x;
      const at = typeof point.x === "string" ? point.data.x[point.pointNumber] : point.x;
      let nearest = 0;
      along.forEach((x, index) => { if (Math.abs(x - at) < Math.abs(along[nearest] - at)) nearest = index; });
      if (along.length) Plotly.Fx.hover(other, [{ curveNumber: number, pointNumber: nearest }]);
    }
    isShared = false;
  }
  function listen(plot) {
    plot.on("plotly_hover", (event) => {
      const point = event.points[0];
      if (isShared || !point?.data.meta) return;
      if (space()) light(point.data.meta);
      if (plot.dataset.kind === "curves") share(plot, point);
    });
    plot.on("plotly_unhover", () => {
      if (isShared) return;
      light(null);
      isShared = true;
      for (const other of document.querySelectorAll(".plot[data-kind=curves]")) if (other !== plot) Plotly.Fx.unhover(other);
      isShared = false;
    });
    plot.on("plotly_relayout", (event) => {
      if (plot.dataset.kind !== "curves" || plot.dataset.own !== (stated().get("x") ?? "step")) return;
      if ("xaxis.range[0]" in event) state({ zoom: [event["xaxis.range[0]"], event["xaxis.range[1]"]].map(encodeURIComponent).join(",") });
      else if (event["xaxis.autorange"]) state({ zoom: null });
      else return;
      redraw();
    });
  }

  // Each chart as a picture, as a table in a file, and over the whole screen.
  function save(name, url) {
    Object.assign(document.createElement("a"), { download: name, href: url }).click();
  }
  // A text that a spreadsheet would take for a formula is not one.
  const quoted = (value) => (typeof value === "number" ? String(value) : `"${String(value ?? "").replace(/^[=+@\t\r-]/, "'$&").replace(/"/g, '""')}"`);
  function rowsOf(payload, figure) {
    if (payload.kind === "curves") {
      const rows = payload.curves.flatMap((curve) => curve.values.map((value, index) => [
        unsafe(curve.name), curve.steps[index], curve.times[index] === null ? "" : new Date(curve.times[index]).toISOString(), value ?? "nan",
      ]));
      return [["curve", unsafe(payload.counter), "time", "value"], ...rows];
    }
    if (payload.kind !== "figure") {
      const known = space();
      return [["run", ...known.fields.map((field) => field.label)], ...known.runs.map((run) => [run.name, ...known.fields.map((field) => run.values[field.name] ?? "")])];
    }
    return [...figure.querySelectorAll("details tr")].map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
  }
  function prepareTools(plot) {
    const figure = plot.closest("figure"), title = figure.querySelector("figcaption").textContent;
    const name = title.replace(/[^\w.-]+/g, "-").slice(0, 60);
    const tools = document.createElement("span");
    tools.className = "tools";
    const add = (text, about, act) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: text, ariaLabel: `${about}: ${title}` });
      button.addEventListener("click", act);
      tools.append(button);
    };
    add("PNG", "Save as a picture", async () => {
      await draw(plot);
      const layout = { ...plot.layout, paper_bgcolor: variable("--paper"), title: { text: safe(title), font: { size: 14 } }, margin: { ...plot.layout.margin, t: 60 } };
      save(name + ".png", await Plotly.toImage({ data: plot.data, layout }, { format: "png", scale: 2, width: plot.clientWidth, height: plot.clientHeight + 40 }));
    });
    add("CSV", "Save as a table", () => {
      const rows = rowsOf(JSON.parse(document.getElementById(plot.dataset.chart).textContent), figure);
      save(name + ".csv", URL.createObjectURL(new Blob([rows.map((row) => row.map(quoted).join(",") + "\n").join("")], { type: "text/csv" })));
    });
    add("full screen", "Fill the screen", () => (document.fullscreenElement ? document.exitFullscreen() : figure.requestFullscreen()));
    plot.before(tools);
  }
  document.addEventListener("fullscreenchange", () => redraw());
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        seen.unobserve(entry.target);
        draw(entry.target);
      }
    }
  }, { rootMargin: "300px" });
  function prepareCharts(root) {
    for (const plot of root.querySelectorAll(".plot")) {
      plot.style.height = plot.dataset.height + "px";
      prepareTools(plot);
      seen.observe(plot);
    }
  }
  function redraw() {
    for (const plot of document.querySelectorAll(".plot[data-drawn]")) draw(plot);
    const known = space();
    const paint = known && painter(known, stated().get("color"));
    for (const row of document.querySelectorAll("[data-run]")) {
      if (!paint) continue;
      const { colour, sign } = paint(row.dataset.run);
      Object.assign(row.querySelector(".swatch"), { textContent: sign }).style.color = colour;
    }
  }
  document.addEventListener("mouseover", (event) => {
    const row = event.target.closest?.("[data-run]");
    if (row || event.target.closest?.("table, p")) light(row ? row.dataset.run : null);
  });

  // Controls of curves.
  function prepareControls(root) {
    for (const form of root.querySelectorAll("[data-controls]")) {
      const asked = stated();
      for (const input of form.querySelectorAll("input")) {
        if (input.type === "radio") input.checked = (asked.get("x") || "step") === input.value;
        if (input.type === "checkbox" && input.name) input.checked = asked.get(input.name) === "1";
        if (input.name === "smooth") input.value = asked.get("smooth") || "0";
      }
      for (const select of form.querySelectorAll("select")) {
        const known = space();
        const usual = { sx: known?.x, sy: known?.y };
        select.value = asked.get(select.name) || usual[select.name] || select.options[0]?.value;
      }
      form.addEventListener("submit", (event) => event.preventDefault());
      form.querySelector("[data-reset]")?.addEventListener("click", () => {
        state({ zoom: null });
        redraw();
      });
      form.addEventListener("input", (event) => {
        const input = event.target;
        if (input.tagName === "SELECT") state({ [input.name]: input.value });
        if (input.name === "x") state({ x: input.value === "step" ? null : input.value, zoom: null });
        if (input.type === "checkbox" && input.name) state({ [input.name]: input.checked ? "1" : null });
        if (input.name === "smooth") state({ smooth: input.value === "0" ? null : input.value });
        redraw();
      });
    }
  }

  // Tables: sorting and filtering cover the rows that are loaded.
  const valueOf = (row, index) => {
    const cell = row.cells[index];
    if (!cell || cell.colSpan > 1) return null; // a row that could not be read
    const text = cell.dataset.value ?? cell.textContent.trim();
    const number = Number(text.replace(/inf$/, "Infinity"));
    return text === "" || text === "nan" ? null : Number.isNaN(number) ? text.toLowerCase() : number;
  };
  function sort(table, name) {
    const down = name.startsWith("-");
    const heads = [...table.tHead.rows[0].cells];
    const index = heads.findIndex((head) => head.dataset.sort === name.replace(/^-/, ""));
    if (index < 0) return;
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[index].setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    // Values of several metrics are never compared: the metric of most runs comes first.
    const kind = (row) => row.cells[index]?.dataset.group ?? "";
    const counts = {};
    for (const row of rows) counts[kind(row)] = (counts[kind(row)] || 0) + 1;
    rows.sort((one, two) => {
      const [empty, other] = [valueOf(one, index) === null, valueOf(two, index) === null];
      if (!empty && !other && kind(one) !== kind(two)) return counts[kind(two)] - counts[kind(one)] || (kind(one) < kind(two) ? -1 : 1);
      const [a, b] = [valueOf(one, index), valueOf(two, index)];
      if (a === null || b === null) return (a === null) - (b === null);
      const order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
    table.caption?.querySelector("[data-order]")?.remove(); // it told the order before
  }
  function filter(input) {
    const wanted = input.value.trim().toLowerCase();
    const table = document.getElementById(input.dataset.filters);
    if (!table) return;
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const aside = row.querySelector("[data-aside]")?.textContent ?? "";  // it names another run
      row.hidden = !row.textContent.replace(aside, "").toLowerCase().includes(wanted);
      shown += row.hidden ? 0 : 1;
    }
    const told = document.getElementById(input.dataset.filters + "-shown");
    if (told) told.textContent = wanted ? `${shown} of ${table.tBodies[0].rows.length} loaded rows match` : "";
    // It would compare rows that are hidden as well, but for those that the server has searched.
    const searched = input.defaultValue.trim().toLowerCase() === wanted;
    for (const link of document.querySelectorAll("[data-compares-all]")) link.hidden = !searched;
  }
  function arrange() {
    const asked = stated();
    for (const table of document.querySelectorAll("table[data-sortable]")) {
      const name = asked.get("sort");
      if (name) sort(table, name);
    }
    for (const input of document.querySelectorAll("[data-filters]")) {
      if (!isFile && asked.has("filter")) input.value = asked.get("filter");
      filter(input);
    }
    count();
  }
  function prepareTables(root) {
    for (const head of root.querySelectorAll("table[data-sortable] th[data-sort]")) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const first = head.classList.contains("num") && !("best" in head.dataset) ? "descending" : "ascending";
        const now = head.getAttribute("aria-sort");
        const next = now === null ? first : now === "ascending" ? "descending" : "ascending";
        const name = (next === "descending" ? "-" : "") + head.dataset.sort;
        state({ sort: name });
        sort(head.closest("table"), name);
      });
    }
    for (const input of root.querySelectorAll("[data-filters]")) {
      input.addEventListener("input", () => {
        if (!isFile) state({ filter: input.value });
        filter(input);
        count();
      });
      // Where all rows are loaded the filter has nothing more to search, and stays a filter when a
      // condition is applied.
      input.form?.addEventListener("submit", (event) => {
        if (input.form.querySelector("[data-searches]")) return;
        if (document.activeElement === input) event.preventDefault();
        else if (input.name) input.name = "filter";
      });
    }
  }

  // Runs are chosen for comparison: one by one, or all rows that the filter shows.
  function count() {
    const told = document.getElementById("chosen-count");
    const boxes = [...document.querySelectorAll("#chosen input[name=run]")];
    const chosen = boxes.filter((box) => box.checked).length;
    if (!told) return;
    told.textContent = chosen ? `${chosen} chosen` : "Choose at least two runs";
    document.querySelector("[data-compares]").disabled = chosen < 2;
    const shown = boxes.filter((box) => !box.closest("tr").hidden);
    const all = document.querySelector("#chosen [data-all]");
    const some = shown.filter((box) => box.checked).length;
    all.checked = some > 0 && some === shown.length;
    all.indeterminate = some > 0 && some < shown.length;
  }
  // Lists in the URL: which runs are hidden or pinned, and which axes are drawn.
  function prepareLists(root) {
    for (const box of root.querySelectorAll("[data-list]")) {
      const name = box.dataset.list;
      if (stated().has(name) || name !== "axes") box.checked = listed(name).includes(box.value) !== (name === "hide");
    }
  }
  document.addEventListener("change", (event) => {
    const name = event.target.dataset.list;
    if (name) {
      const boxes = [...document.querySelectorAll(`[data-list=${name}]`)].filter((box) => box.checked !== (name === "hide"));
      state({ [name]: boxes.map((box) => encodeURIComponent(box.value)).join(",") });
      redraw();
    }
    if ("all" in event.target.dataset) {
      for (const box of document.querySelectorAll("#chosen input[name=run]")) {
        if (!box.closest("tr").hidden) box.checked = event.target.checked;
      }
    }
    if ("submits" in event.target.dataset) event.target.form.requestSubmit();
    count();
  });
  // A form that changes one thing of a page keeps the others, what the script set included.
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (event.defaultPrevented || form.id === "chosen" || form.method === "post") return;
    const own = new Set([...form.elements].map((input) => input.name));
    for (const [name, value] of stated()) {
      if (own.has(name) || !value) continue;
      form.append(Object.assign(document.createElement("input"), { type: "hidden", name, value }));
    }
  });

  // A link to more of the same keeps what the controls have set.
  document.addEventListener("click", (event) => {
    const more = event.target.closest("a[data-keeps]");
    if (!more) return;
    const url = new URL(more.href);
    for (const [name, value] of stated()) if (!url.searchParams.has(name)) url.searchParams.append(name, value);
    more.href = url;
  });

  // Buttons that copy a snippet.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    const before = button.textContent;
    button.textContent = "copied";
    setTimeout(() => (button.textContent = before), 1500);
  });

  // Runs that grow: a small JSON says whether there is something new; then the parts of the page
  // that are marked are replaced. Ticks, open details and focus stay as they are.
  function replace(old, fresh) {
    const source = fresh.outerHTML;
    const checked = new Set([...old.querySelectorAll("input:checked")].map((input) => input.value));
    const open = new Set([...old.querySelectorAll("details[open][id]")].map((one) => one.id));
    const focus = old.contains(document.activeElement) ? document.activeElement.id : "";
    for (const input of fresh.querySelectorAll("input[name][type=checkbox]")) input.checked = checked.has(input.value);
    for (const id of open) fresh.querySelector("#" + CSS.escape(id))?.setAttribute("open", "");
    old.replaceWith(fresh);
    sources.set(fresh, source);
    prepareTables(fresh);
    prepareCharts(fresh);
    prepareLists(fresh);
    redraw();
    if (focus) document.getElementById(focus)?.focus();
  }
  const sources = new WeakMap();
  async function refetch() {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const old of document.querySelectorAll("[data-live][id]")) {
      const found = fresh.getElementById(old.id);
      if (found && sources.get(old) !== found.outerHTML) replace(old, document.importNode(found, true));
    }
    document.body.dataset.following = fresh.body.dataset.following;
    arrange();
    const told = document.getElementById("told");
    if (told) told.textContent = "updated";
  }
  function follow() {
    let pause = 3000;
    const look = async () => {
      const now = JSON.parse(document.body.dataset.following || "{}");
      try {
        if (now.partial) {
          pause = 300;
          await refetch();
        } else if (Object.keys(now.runs || {}).length && !document.hidden) {
          const query = new URLSearchParams(Object.entries(now.runs).map(([run, n]) => ["run", run + "@" + n]));
          const answer = await fetch("/changes.json?" + query);
          const isNew = answer.ok && (await answer.json()).changed;
          if (isNew) await refetch();
          pause = isNew ? 3000 : Math.min(pause * 1.5, 30000);
        } else if (!Object.keys(now.runs || {}).length) return;
      } catch (error) {
        pause = 30000; // the server was stopped; it may come back
      }
      setTimeout(look, pause);
    };
    setTimeout(look, JSON.parse(document.body.dataset.following || "{}").partial ? 200 : pause);
  }

  // A link to a part of a report opens the part, and what holds it; so does a printer, all of them.
  function reveal() {
    const found = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let one = found?.closest("details"); one; one = one.parentElement.closest("details")) one.open = true;
    found?.scrollIntoView();
  }
  if (isFile) {
    addEventListener("hashchange", reveal);
    addEventListener("beforeprint", () => document.querySelectorAll("details.part").forEach((part) => (part.open = true)));
    reveal();
  }

  for (const live of document.querySelectorAll("[data-live][id]")) sources.set(live, live.outerHTML);
  prepareTables(document);
  prepareControls(document);
  prepareCharts(document);
  prepareLists(document);
  redraw();
  arrange();
  if (!isFile) follow();
  addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.documentElement.dataset.ready = "1";
})();
