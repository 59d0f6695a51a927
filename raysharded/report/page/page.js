"use strict";
// Draws the charts of a run's report from the data in the page, as SVG. Text goes in as text nodes alone.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = data.charts.filter((chart) => chart.counted.y.length || chart.lost.y.length);
  if (!charts.length) return;

  const place = document.getElementById("charts");
  const readout = document.getElementById("readout");
  const LINED = new Set(["recovery", "reshard", "resumed", "numbers", "failed"]);
  const HEIGHT = 170, LEFT = 62, RIGHT = 12, TOP = 8, BOTTOM = 24, ROW = 24, ROWS = 3, DOTS = 100;
  const overWhat = { step: "step", t: "time" };
  let axis = "step", scale = "linear", width = 0, cursor = null, chosen = -1, views = [];

  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const html = (tag, className, ...children) => {
    const node = document.createElement(tag);
    node.className = className;
    node.append(...children);
    return node;
  };

  // -- numbers as people read them --

  const number = (value) => {
    if (value === null) return "not finite";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
    return String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
  };
  const duration = (seconds) => {
    if (seconds < 10) return `${Number(seconds.toFixed(2))} s`;
    const whole = Math.round(seconds);
    for (const [big, size, small, less] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]]) {
      if (whole >= size) {
        const rest = Math.floor((whole % size) / less);
        return `${Math.floor(whole / size)} ${big}${rest ? ` ${rest} ${small}` : ""}`;
      }
    }
    return `${whole} s`;
  };
  const moment = (t) =>
    data.begun === null ? "" : `${new Date((data.begun + t) * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;

  // -- scales --

  const ticks = (low, high, wanted, time) => {
    const raw = (high - low) / wanted;
    let size;
    if (time && raw > 1) {
      const nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
      size = nice.find((each) => each >= raw) || 86400 * Math.ceil(raw / 86400);
    } else {
      const power = 10 ** Math.floor(Math.log10(raw));
      size = power * ([1, 2, 2.5, 5, 10].find((each) => each * power >= raw) || 10);
    }
    const found = [];
    for (let index = Math.ceil(low / size - 1e-9); index * size <= high + size * 1e-9; index++) found.push(index * size);
    return found;
  };
  // Values for an axis of logarithms: 1, 2 and 5 times powers of ten, or fewer, or more.
  const powers = (low, high) => {
    const few = [], all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const digit of [1, 2, 5]) {
        const value = Number(`${digit}e${power}`);
        if (value < low || value > high) continue;
        all.push(value);
        if (digit === 1) few.push(value);
      }
    }
    if (all.length < 2) return ticks(low, high, 4, false);
    return all.length <= 7 ? all : few.filter((_, index) => index % Math.ceil(few.length / 7) === 0);
  };
  const extent = (chart) => {
    let low = Infinity, high = -Infinity;
    for (const series of [chart.counted, chart.lost]) {
      for (const y of series.y) if (y !== null) { low = Math.min(low, y); high = Math.max(high, y); }
    }
    return [low, high];
  };
  const canBeLog = (chart) => chart.log && extent(chart)[0] > 0 && extent(chart)[1] < Infinity;
  const domain = () => {
    if (axis === "t") return [0, data.total || 1];
    let low = Infinity, high = -Infinity;
    for (const chart of charts) {
      for (const series of [chart.counted, chart.lost]) {
        for (const step of series.step) if (step !== null) { low = Math.min(low, step); high = Math.max(high, step); }
      }
    }
    for (const mark of data.marks) { low = Math.min(low, mark.step); high = Math.max(high, mark.step); }
    return low < high ? [low, high] : [low - 1, high + 1];
  };
  const range = (chart, log) => {
    let [low, high] = extent(chart);
    if (low > high) return [0, 1];
    if (log) {
      const room = low === high ? 2 : (high / low) ** 0.05;
      return [low / room, high * room];
    }
    if (chart.name === "workers" || chart.name === "rate") low = 0;
    if (low === high) return low ? [Math.min(0, 2 * low), Math.max(0, 2 * low)] : [-1, 1];
    const room = (high - low) * 0.05;
    return [low === 0 ? 0 : low - room, high + room];
  };

  // -- drawing --

  // The points of a series in runs without a break: where a value is not finite, and where a row is empty, which only
  // for steps that count is no break over steps: nothing was computed between them for a while.
  const runs = (series, gone) => {
    const found = [];
    let run = null, before = -Infinity;
    series.step.forEach((step, index) => {
      if (step === null) {
        if (axis === "t" || gone) run = null;
        return;
      }
      if (step <= before) run = null;
      before = step;
      if (series.y[index] === null) { run = null; return; }
      if (!run) found.push((run = []));
      run.push(index);
    });
    return found;
  };
  const line = (run, series, x, y, stepped) =>
    run.map((index, order) => {
      const at = [x(series[axis][index]).toFixed(1), y(series.y[index]).toFixed(1)];
      return !order ? `M${at[0]} ${at[1]}` : stepped ? `V${at[1]}H${at[0]}` : `L${at[0]} ${at[1]}`;
    }).join("");

  const describe = (chart) => {
    const shown = chart.counted.y.filter((value) => value !== null);
    if (!shown.length) return `${chart.title}: no step counts yet.`;
    let low = shown[0], high = shown[0];
    for (const value of shown) { low = Math.min(low, value); high = Math.max(high, value); }
    return `${chart.title} over ${overWhat[axis]}: from ${number(shown[0])} to ${number(shown[shown.length - 1])}, lowest ` +
      `${number(low)}, highest ${number(high)}.`;
  };

  const drawChart = (chart, x, low, high) => {
    const log = scale === "log" && canBeLog(chart), [bottom, top] = range(chart, log);
    const at = log ? (value) => Math.log(value / bottom) / Math.log(top / bottom) : (value) => (value - bottom) / (top - bottom);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - at(value));
    const svg = make("svg", {
      viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": describe(chart), "data-chart": chart.name,
      "aria-describedby": "keys",
    });
    for (const value of log ? powers(bottom, top) : ticks(bottom, top, 5, false)) {
      if (chart.name === "workers" && value % 1) continue;
      svg.append(make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      svg.append(make("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
    }
    for (const value of ticks(low, high, Math.max(2, Math.min(8, width / 110)), axis === "t")) {
      if (axis === "step" && value % 1) continue;
      const end = x(value) > width - 30;
      svg.append(make("text", { x: end ? width : x(value), y: HEIGHT - 6, "text-anchor": end ? "end" : "middle" },
        axis === "t" ? duration(value) : String(value)));
    }
    svg.append(make("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
    for (const mark of data.marks) {
      if (!LINED.has(mark.kind)) continue;
      const at = x(mark[axis]);
      svg.append(make("line", { class: `when k-${mark.kind}`, x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    for (const [series, gone] of [[chart.lost, " gone"], [chart.counted, ""]]) {
      const found = runs(series, gone);
      const path = found.filter((run) => run.length > 1).map((run) => line(run, series, x, y, chart.stepped)).join("");
      if (path && !(chart.sparse && gone)) svg.append(make("path", { class: `line${gone}`, d: path }));
      const dots = chart.sparse && (gone || series.y.length <= DOTS) ? found.flat() : found.filter((run) => run.length === 1).flat();
      for (const index of dots) {
        svg.append(make("circle", { class: `dot${gone}`, cx: x(series[axis][index]), cy: y(series.y[index]), r: 2.5 }));
      }
    }
    const hair = make("line", { class: "cursor", x1: 0, x2: 0, y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    const point = make("circle", { class: "point", r: 4, visibility: "hidden" });
    svg.append(hair, point);
    return { chart, svg, x, y, hair, point, log };
  };

  // The lane above the charts: where time went, if time is the axis, and a mark for every incident.
  const drawLane = (x) => {
    const rows = Array(ROWS).fill(-Infinity);
    const base = axis === "t" ? 22 : 4;
    const svg = make("svg", { role: "group", "aria-label": "Incidents", id: "lane" });
    if (axis === "t") {
      for (const [part, begin, end] of data.pieces) {
        const wide = Math.max(0.5, x(end) - x(begin));
        svg.append(make("rect", { class: data.parts[part].replace(" ", "-"), x: x(begin), y: 2, width: wide, height: 14 },
          make("title", {}, `${data.parts[part]}: ${duration(end - begin)}`)));
      }
    }
    data.marks.map((mark, index) => [x(mark[axis]), mark, index]).sort((a, b) => a[0] - b[0]).forEach(([at, mark, index]) => {
      let row = rows.findIndex((end) => at - end >= ROW - 2);
      if (row < 0) row = rows.indexOf(Math.min(...rows));
      rows[row] = at;
      const node = make("g", {
        class: `mark k-${mark.kind}`, role: "button", "aria-label": `${where(mark)}: ${mark.text}`, tabindex: "-1", "data-mark": index,
      }, make("title", {}, mark.text), make("circle", { cx: at, cy: base + row * ROW + 12, r: 9 }),
      make("text", { x: at, y: base + row * ROW + 16 }, mark.letter));
      svg.append(node);
    });
    const used = rows.filter((end) => end > -Infinity).length;
    svg.setAttribute("viewBox", `0 0 ${width} ${base + used * ROW + 2}`);
    return svg;
  };
  const where = (mark) => `step ${mark.step}, ${duration(mark.t)}`;

  const draw = () => {
    width = Math.max(260, Math.floor(place.clientWidth || 960));
    const [low, high] = domain();
    const x = (value) => LEFT + (width - LEFT - RIGHT) * ((value - low) / (high - low));
    const lane = drawLane(x);
    views = charts.map((chart) => drawChart(chart, x, low, high));
    place.replaceChildren(
      html("figure", "lane", html("figcaption", "", axis === "step" ? "Incidents" : data.marks.length ? "Time and incidents" : "Time"), lane),
      ...views.map(({ chart, svg, log }) => {
        const last = chart.counted.y[chart.counted.y.length - 1];
        const value = html("span", "", [...(log ? ["logarithmic"] : []), ...(last === undefined ? [] : [`last ${number(last)}`])].join(" · "));
        return html("figure", "", html("figcaption", "", chart.title, value), svg);
      }),
    );
    if (!data.marks.length && axis === "step") place.firstChild.remove();
    const first = place.querySelector(".mark");
    if (first) first.setAttribute("tabindex", "0");
    listen();
    point();
  };

  // -- pointing --

  const nearest = (series, at, stepped = false) => {
    let best = -1, far = Infinity;
    series[axis].forEach((value, index) => {
      if (value === null) return;
      const away = stepped && value < at ? 1e15 - value : Math.abs(value - at); // a step's workers are those up to its end
      if (away >= far) return;
      far = away;
      best = index;
    });
    return best;
  };

  // Of the points that count and those that were lost: steps that count go first where both are as near.
  const closest = (chart, at) => {
    const away = (series, index) => (index < 0 ? Infinity : Math.abs(series[axis][index] - at));
    const [counted, lost] = [chart.counted, chart.lost].map((series) => nearest(series, at, chart.stepped));
    return away(chart.lost, lost) < away(chart.counted, counted) ? [chart.lost, lost] : [chart.counted, counted];
  };

  const name = (chart) => chart.title[0].toLowerCase() + chart.title.slice(1);
  const point = () => {
    const none = cursor === null;
    const said = [];
    for (const view of views) {
      const [series, index] = none ? [null, -1] : closest(view.chart, cursor);
      const shown = index >= 0 && series.y[index] !== null;
      view.hair.setAttribute("visibility", none ? "hidden" : "visible");
      view.point.setAttribute("visibility", shown ? "visible" : "hidden");
      if (none) continue;
      view.hair.setAttribute("x1", view.x(cursor));
      view.hair.setAttribute("x2", view.x(cursor));
      if (index < 0) continue;
      if (shown) {
        view.point.setAttribute("cx", view.x(view.chart.stepped ? cursor : series[axis][index]));
        view.point.setAttribute("cy", view.y(series.y[index]));
      }
      if (!said.length) {
        const lost = series === view.chart.lost ? ", whose result was lost" : "";
        said.push(`step ${series.step[index]}${lost}`, `${duration(series.t[index])} (${moment(series.t[index])})`);
      }
      const elsewhere = view.chart.sparse ? ` (step ${series.step[index]})` : "";
      said.push(`${name(view.chart)} ${number(series.y[index])}${elsewhere}`);
    }
    const mark = chosen >= 0 ? data.marks[chosen] : null;
    readout.replaceChildren(...(mark ? [html("strong", "", `${where(mark)}: `), mark.text] : [html("span", "said", said.join(" · "))]));
    place.querySelectorAll(".mark").forEach((node) => node.classList.toggle("on", Number(node.dataset.mark) === chosen));
    document.querySelectorAll("tr[data-incident]").forEach((row) => {
      row.classList.toggle("on", chosen >= 0 && Number(row.dataset.incident) === data.marks[chosen].number);
    });
  };
  const choose = (index) => {
    chosen = index;
    cursor = index < 0 ? cursor : data.marks[index][axis];
    point();
  };

  const listen = () => {
    const marks = [...place.querySelectorAll(".mark")];
    marks.forEach((node, order) => {
      const index = Number(node.dataset.mark);
      node.addEventListener("focus", () => choose(index));
      node.addEventListener("pointerenter", () => choose(index));
      node.addEventListener("click", () => {
        const row = document.querySelector(`tr[data-incident="${data.marks[index].number}"]`);
        if (row) row.scrollIntoView({ block: "center" });
      });
      node.addEventListener("keydown", (event) => {
        const next = { ArrowRight: order + 1, ArrowLeft: order - 1, Home: 0, End: marks.length - 1 }[event.key];
        if (event.key === "Enter" || event.key === " ") node.dispatchEvent(new Event("click"));
        if (next === undefined || !marks[next]) return;
        event.preventDefault();
        node.setAttribute("tabindex", "-1");
        marks[next].setAttribute("tabindex", "0");
        marks[next].focus();
      });
    });
    const [low, high] = domain();
    for (const view of views) {
      view.svg.addEventListener("pointermove", (event) => {
        const box = view.svg.getBoundingClientRect();
        const at = ((event.clientX - box.left) / box.width) * width;
        const value = low + ((at - LEFT) / (width - LEFT - RIGHT)) * (high - low);
        cursor = Math.min(high, Math.max(low, value));
        choose(-1);
      });
      view.svg.addEventListener("keydown", (event) => {
        const xs = view.chart.counted[axis].filter((value) => value !== null);
        if (!xs.length) return;
        const here = cursor === null ? -1 : xs.indexOf(view.chart.counted[axis][nearest(view.chart.counted, cursor)]);
        const next = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: xs.length - 1 }[event.key];
        if (next === undefined) return;
        event.preventDefault();
        cursor = xs[Math.min(xs.length - 1, Math.max(0, next))];
        choose(-1);
      });
    }
  };

  document.querySelectorAll('input[name="axis"]').forEach((input) => {
    input.addEventListener("change", () => {
      const counted = charts[0].counted;
      const index = cursor === null ? -1 : nearest(counted, cursor);
      axis = input.value;
      cursor = chosen >= 0 ? data.marks[chosen][axis] : index >= 0 ? counted[axis][index] : null;
      draw();
    });
  });
  if (charts.some(canBeLog)) {
    document.querySelectorAll('input[name="scale"]').forEach((input) => {
      input.addEventListener("change", () => { scale = input.value; draw(); });
    });
  } else {
    document.getElementById("scale").remove();
  }
  document.getElementById("course-section").hidden = false;
  draw();
  let drawn = place.clientWidth;
  new ResizeObserver(() => {
    if (place.clientWidth !== drawn) { drawn = place.clientWidth; draw(); }
  }).observe(place);
})();
