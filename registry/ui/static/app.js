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
      linecolor: variable("--line"), tickcolor: variable("--line"), fixedrange: narrow(),
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
  const SYMBOLS = { best: "star", gate: "diamond", release: "star-diamond", fork: "triangle-up" };

  function curves(payload) {
    const asked = stated();
    const hasTimes = payload.curves.every((curve) => curve.times.every((time) => time !== null));
    const byTime = asked.get("x") === "time" && hasTimes;
    const by = Math.min(Math.max(Number(asked.get("smooth")) || 0, 0), 0.99);
    const along = (one) => (byTime ? one.times : one.steps);
    const colours = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"].map(variable);
    const data = [];
    const groups = [...new Set(payload.curves.filter((curve) => !curve.faint).map((curve) => curve.group))];
    const told = new Set();
    // Over several curves one box has all values, with the step or time as its heading.
    const isUnified = payload.curves.length > 1;
    payload.curves.forEach((curve) => {
      const index = groups.indexOf(curve.group);
      const colour = curve.faint ? variable("--faint") : colours[index % colours.length];
      const key = curve.faint ? curve.name : curve.group;
      const few = curve.values.length <= 40;
      const line = {
        type: "scatter", x: along(curve), y: curve.values, name: told.has(key) || curve.faint ? curve.name : curve.group,
        legendgroup: key, showlegend: isUnified && !told.has(key),
        // Equal curves of several runs are seen beneath one another.
        mode: few ? "lines+markers" : "lines", line: { color: colour, width: 1.8 + (payload.overlays ? Math.max(0, Math.min(groups.length, 4) - 1 - index) : 0), dash: curve.faint ? "dot" : "solid" },
        marker: { size: 5, color: colour },
        text: curve.values.map(() => curve.name), hovertemplate: (isUnified ? "" : "%{x}: ") + "%{y:.6g}<extra>%{text}</extra>",
      };
      told.add(key);
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
      xaxis: byTime ? { type: "date" } : { title: { text: payload.counter, standoff: 4 }, rangemode: "normal" },
      yaxis: { type: asked.get("log") === "1" ? "log" : "linear" },
      showlegend: isUnified || payload.marks.length > 0,
      hovermode: isUnified ? "x unified" : "closest",
    };
    return { data, layout };
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
    const figure = payload.kind === "curves" ? curves(payload) : { data: themed(payload.data), layout: themed(payload.layout) };
    const named = figure.layout.showlegend ? figure.data.filter((one) => one.showlegend !== false).length : 0;
    const height = Number(plot.dataset.height) + 20 * Math.ceil(named / (narrow() ? 2 : 4));
    plot.style.height = height + "px";
    if (window.Plotly) {  // without it the tables beneath the charts remain
      plot.dataset.drawn = "1";
      Plotly.react(plot, figure.data, layoutOf(figure.layout, height), { displayModeBar: false, responsive: true, scrollZoom: false });
    }
  }
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
      seen.observe(plot);
    }
  }
  function redraw() {
    for (const plot of document.querySelectorAll(".plot[data-drawn]")) draw(plot);
  }

  // Controls of curves.
  function prepareControls(root) {
    for (const form of root.querySelectorAll("[data-controls]")) {
      const asked = stated();
      for (const input of form.querySelectorAll("input")) {
        if (input.type === "radio") input.checked = (asked.get("x") || "step") === input.value;
        if (input.name === "log") input.checked = asked.get("log") === "1";
        if (input.name === "smooth") input.value = asked.get("smooth") || "0";
      }
      form.addEventListener("submit", (event) => event.preventDefault());
      form.addEventListener("input", (event) => {
        const input = event.target;
        if (input.name === "x") state({ x: input.value === "step" ? null : input.value });
        if (input.name === "log") state({ log: input.checked ? "1" : null });
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
    rows.sort((one, two) => {
      const [a, b] = [valueOf(one, index), valueOf(two, index)];
      if (a === null || b === null) return (a === null) - (b === null);
      const order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }
  function filter(input) {
    const wanted = input.value.trim().toLowerCase();
    const table = document.getElementById(input.dataset.filters);
    if (!table) return;
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
      shown += row.hidden ? 0 : 1;
    }
    const told = document.getElementById(input.dataset.filters + "-shown");
    if (told) told.textContent = wanted ? `${shown} of ${table.tBodies[0].rows.length} loaded rows match` : "";
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
  }
  function prepareTables(root) {
    for (const head of root.querySelectorAll("table[data-sortable] th[data-sort]")) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const first = head.classList.contains("num") ? "descending" : "ascending";
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
      });
      // Where all rows are loaded there is no button: Enter has nothing more to search.
      input.form?.addEventListener("submit", (event) => input.form.querySelector("button") || event.preventDefault());
    }
  }

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
    for (const input of fresh.querySelectorAll("input[type=checkbox]")) input.checked = checked.has(input.value);
    for (const id of open) fresh.querySelector("#" + CSS.escape(id))?.setAttribute("open", "");
    old.replaceWith(fresh);
    sources.set(fresh, source);
    prepareTables(fresh);
    prepareCharts(fresh);
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

  for (const live of document.querySelectorAll("[data-live][id]")) sources.set(live, live.outerHTML);
  prepareTables(document);
  prepareControls(document);
  prepareCharts(document);
  arrange();
  if (!isFile) follow();
  addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.documentElement.dataset.ready = "1";
})();
